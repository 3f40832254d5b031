"""MXNet's learner: one process, a replica of the model on each of its devices.

Nothing in a step makes the host wait for that step: every call hands work to MXNet's engine, which works on all devices
at once. The one wait is for the sums of two steps ago, see :mod:`.step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from manyhands.backends.mxnet import devices as backend
from manyhands.errors import BadSettings
from manyhands.placement.moves import Placement
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.checkpoints import saving, tensors
from manyhands.training.data.labels import Look
from manyhands.training.data.order import Cursor, Window
from manyhands.training.data.sources import Source
from manyhands.training.learner import Saved, Take, named_rates
from manyhands.training.mxnet import optimizers, replicas
from manyhands.training.mxnet.evaluation import Evaluation
from manyhands.training.mxnet.objective import Objective
from manyhands.training.mxnet.step import Feed, RunningSums, Shards, TrainingStep
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals


class GluonLearner:
    """A :class:`~manyhands.training.learner.Learner`. :func:`.replicas.on` has put the model on its devices."""

    framework = "mxnet"
    rank, size = 0, 1

    def __init__(
        self,
        model: Any,
        trainer: Any,
        objective: Objective,
        settings: Settings,
        data: Source,
        test: Source | None,
        devices: Sequence[mx.Context],
        look: Look | None = None,
    ) -> None:
        self.model, self.trainer, self.settings = model, trainer, settings
        self.devices, self.data, self.test = list(devices), data, test
        self.notes: list[str] = []
        self.shares = settings.fixed_shares
        self.optimizer_name = type(trainer.optimizer).__name__
        self.optimizer_options = optimizers.optimizer_options(trainer)
        self.base_rate = None if trainer.optimizer.lr_scheduler else float(trainer.learning_rate)
        dtype = replicas.distinct(model)[0].dtype
        several = len(devices) > 1 and replicas.normalises(model)
        self.feed = Feed(data, devices, dtype, least=2 if several else 1, look=look)
        test_feed = None if test is None else Feed(test, devices, dtype, look=look)
        self.evaluation = None if test_feed is None else Evaluation(objective, test_feed, settings)
        self.sums = RunningSums(self.devices[0])
        self.whole_step = TrainingStep(trainer, objective, self.sums, settings.gradient_clip_val)

    def close(self) -> None:
        self._share_statistics()
        self.whole_step.close()

    # Steps

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Shards]]:
        settings = self.settings
        return self.feed.batches(cursor, settings.batch_size, settings.seed, self.shares)

    def step(self, window: Window, batch: Shards, factor: float | None) -> None:
        if factor is not None and self.base_rate is not None:
            self.trainer.set_learning_rate(self.base_rate * factor)
        self._seed(window.step)
        self.whole_step(batch, window.size, window.step)

    def _seed(self, step: int) -> None:
        """Seed the random numbers of every device: MXNet cannot save the state of its generators.

        They depend only on the seed, the step and the device, so a resumed job draws the same ones.
        """
        for number, device in enumerate(self.devices):
            mixed = np.random.SeedSequence((self.settings.seed, step, number)).generate_state(1)[0]
            mx.random.seed(int(mixed >> 1), ctx=device)

    # Totals

    def peek(self) -> Totals | None:
        return self.sums.peek()

    def keep_average(self, averaging: Averaging) -> None:
        raise BadSettings("EMA: MXNet's trainer keeps no average of the weights, those of the other frameworks do")

    def with_averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send_totals(self, step: int) -> None:
        self.sums.send(step)

    def arrived_totals(self, *, wait: bool) -> list[tuple[int, Totals]]:
        return self.sums.take_arrived(wait=wait)

    def learning_rates(self) -> dict[str, float]:
        return named_rates([float(self.trainer.learning_rate)])

    def read(self) -> list[Totals]:
        return [self.sums.read()]

    def reset(self) -> None:
        self.sums.reset()

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals | None:
        self._share_statistics()
        return None if self.evaluation is None else self.evaluation.evaluate(alive, take)

    # Checkpoints

    def save(self) -> Saved | None:
        self._share_statistics()
        arrays = optimizers.optimizer_arrays(self.trainer._updaters[0])
        numbers = {name: array.asnumpy() for name, array in arrays.items()}
        return Saved(
            state={
                "world": 1,
                "devices": Placement(backend).names(self.devices),
                "optimizer": optimizers.optimizer_numbers(self.trainer),
            },
            blobs={
                "model": tensors.pack(replicas.model_tensors(self.model)),
                "optimizer": tensors.pack(numbers),
            },
        )

    def restore(self, saved: Mapping[str, Any], blobs: Mapping[str, bytes], totals: Totals) -> None:
        replicas.restore_model(self.model, blobs["model"])
        if "optimizer" in blobs:  # weights from another framework come alone
            optimizers.restore_optimizer(
                self.trainer,
                blobs["optimizer"],
                saved["optimizer"],
                lambda name: saving.is_kept(name, self.optimizer_options, saved),
            )
        self.sums.restore(totals)

    def from_first(self, data: bytes) -> bytes:
        return data

    def all_have(self, number: int) -> bool:
        return True

    def _share_statistics(self) -> None:
        """Running statistics differ from device to device; those of the (first) largest share count."""
        largest = self.shares.index(max(self.shares)) if self.shares else 0
        replicas.spread(replicas.statistics(self.model), largest)
