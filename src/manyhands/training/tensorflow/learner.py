"""TensorFlow's learner: one process of a job, with all of its devices.

The step (:mod:`.step`) is one ``tf.function``. On CPU devices TensorFlow returns when the step is done; on GPUs the
host runs ahead by what CUDA's queue holds. A separate thread reads the totals that are shown, so that no step waits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.backends.tensorflow import devices as backend
from manyhands.placement.moves import Placement
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.checkpoints import tensors
from manyhands.training.data.labels import Look
from manyhands.training.data.order import Cursor, Window
from manyhands.training.data.sources import Source, prepared_by
from manyhands.training.learner import NO_AVERAGE, Saved, Take, named_rates
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals
from manyhands.training.tensorflow import keras_callbacks, optimizers
from manyhands.training.tensorflow.evaluation import Evaluation, compiled_names
from manyhands.training.tensorflow.keras_callbacks import KerasCallback
from manyhands.training.tensorflow.model import Function, batch_norms, names
from manyhands.training.tensorflow.objective import Objective
from manyhands.training.tensorflow.step import BAD_STEP, Feed, StepInput, TrainingStep
from manyhands.training.tensorflow.world import World

_NONE_BAD = 2.0**62  # the first bad step, where there is none: processes exchange numbers


@dataclasses.dataclass
class Job:
    """What to train, and how."""

    model: Any
    objective: Objective
    optimizer: Any
    train: Source
    test: Source | None
    settings: Settings
    labels: Look | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


class KerasLearner:
    """A :class:`~manyhands.training.learner.Learner` for Keras models."""

    framework = "tensorflow"

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world, self.settings = job, world, job.settings
        self.rank, self.size = world.rank, world.size
        self.data, self.test = job.train, job.test
        self.shares = job.settings.fixed_shares
        self.optimizer_name = type(job.optimizer).__name__
        self.optimizer_options = optimizers.options(job.optimizer)
        function = Function(job.model, job.objective, job.settings.seed)
        self.optimizer = optimizers.stateless(job.optimizer, function.trained)
        memory = optimizers.memory(job.optimizer, self.optimizer, job.model)
        self.step_of = TrainingStep(world.strategy, function, self.optimizer, memory, job.settings)
        self.variables = self._variables()
        self.memory = {str(number): variable for number, variable in enumerate(self.step_of.memory)}
        self.callbacks: list[KerasCallback] = []  # of Keras
        self.notes = list(job.notes)
        if job.test is None and compiled_names(job.model):
            self.notes.append("metrics of model.compile are computed over validation data, and there are none")
        # Of a single sample there are no statistics.
        normalises = world.replicas > 1 and any(layer.trainable for layer in batch_norms(job.model))
        self.least = 2 if normalises and not self.step_of.all_take_part else 1
        self.feed = Feed(job.train, world.replicas, job.labels)
        self._train = self.step_of.trainer(prepared_by(job.train))
        self.evaluation = None if job.test is None else Evaluation(self.step_of, world, job.test, job.labels)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="manyhands-totals")
        self._coming: Future[Totals] | None = None
        self._shown: Totals | None = None
        self._counted = False
        self._sent: collections.deque[tuple[int, Future[Totals]]] = collections.deque()
        self._last = 0, 1.0  # the last step, and its factor of the learning rate
        self.step_of.copy_from_first(world)
        rate = self.step_of.rate
        self._base_rate = None if rate is None else float(self.step_of.value(self.step_of.memory[rate]))

    def _variables(self) -> dict[str, Any]:
        """This process's replicas' variables, by the names of the model's weights."""
        function, step = self.step_of.function, self.step_of
        of_model, of_step = [*function.trained, *function.statistics], [*step.weights, *step.statistics]
        by_id = {id(variable): replicated for variable, replicated in zip(of_model, of_step, strict=True)}
        weights = self.job.model.weights
        return {name: by_id[id(weight)] for name, weight in zip(names(self.job.model), weights, strict=True)}

    # Steps

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, StepInput]]:
        return self.feed.batches(cursor, self.settings.batch_size, self.settings.seed, self.shares, self.least)

    def step(self, window: Window, batch: StepInput, factor: float | None) -> None:
        rate = np.float64(1.0 if factor is None else factor)
        self._last = window.step, float(rate)
        self._train(batch.data, batch.order, batch.bounds, np.int64(window.step), rate)

    # Totals

    def peek(self) -> Totals | None:
        """Read by another thread: reading waits for the device."""
        if self._coming is not None and self._coming.done():
            self._shown, self._coming = self._coming.result(), None
        if self._coming is None:
            snapshot = [variable.read_value() for variable in self.step_of.on_each(self.step_of.sums)]
            self._coming = self._reader.submit(self._totals, snapshot)
        return self._shown

    def keep_average(self, averaging: Averaging) -> None:
        self.step_of.keep_average(averaging)

    @contextlib.contextmanager
    def with_averaged_weights(self) -> Iterator[None]:
        pairs = [
            (weight, average)
            for both in zip(self.step_of.averaged, self.step_of.average, strict=True)
            for weight, average in zip(*map(self.step_of.on_each, both), strict=True)
        ]
        weights = [weight.read_value() for weight, _ in pairs]
        for weight, average in pairs:
            weight.assign(average.read_value())
        try:
            yield
        finally:
            for (weight, _), value in zip(pairs, weights, strict=True):
                weight.assign(value)

    def send_totals(self, step: int) -> None:
        """Another thread reads them, like those that are shown. Devices add up the sums of several replicas."""
        sums = self.step_of.on_each(self.step_of.sums_together())[0]
        self._sent.append((step, self._reader.submit(self._totals, [sums])))

    def arrived_totals(self, *, wait: bool) -> list[tuple[int, Totals]]:
        arrived = []
        while self._sent and (wait or self._sent[0][1].done()):
            step, totals = self._sent.popleft()
            arrived.append((step, dataclasses.replace(totals.result(), bad_step=None)))
        return arrived

    def learning_rates(self) -> dict[str, float]:
        """From numbers on the host: the optimizer's first rate times the factor, or a Keras schedule at this step."""
        schedule = self.job.optimizer._learning_rate
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            with tf.device("/device:CPU:0"):
                return named_rates([float(schedule(self._last[0]))])
        return {} if self._base_rate is None else named_rates([self._base_rate * self._last[1]])

    def read(self) -> list[Totals]:
        totals = self._totals(self.step_of.on_each(self.step_of.sums))
        bad = _NONE_BAD if totals.bad_step is None else totals.bad_step
        rows = self.world.gather([totals.loss_sum, totals.correct, totals.count, bad, totals.counted])
        return [
            Totals(a, b, c, None if bad == _NONE_BAD else int(bad), bool(counted)) for a, b, c, bad, counted in rows
        ]

    def reset(self) -> None:
        self.step_of.set_sums(Totals())
        self._coming, self._shown = None, None

    def _totals(self, parts: Sequence[Any]) -> Totals:
        """The sums of this process's replicas together."""
        values = [part.numpy() for part in parts]
        loss, correct, count = (float(total) for total in np.sum(values, axis=0)[:BAD_STEP])
        bad = min(float(value[BAD_STEP]) for value in values)
        counted = self.step_of.counts_correct or self._counted
        return Totals(loss, correct, count, None if math.isinf(bad) else int(bad), counted)

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals | None:
        self._share_statistics()
        return None if self.evaluation is None else self.evaluation.evaluate(alive, take, counted=self._counted)

    # Checkpoints

    def save(self) -> Saved | None:
        self._share_statistics()
        if not self.world.first:
            return None
        blobs = {"model": self._pack(self.variables), "optimizer": self._pack(self.memory)}
        blobs |= keras_callbacks.pack(self.callbacks)
        if self.step_of.average:
            with self.with_averaged_weights():
                blobs["average"] = self._pack(self.variables)
        return Saved({"world": self.world.replicas, "devices": Placement(backend).names(self.world.devices)}, blobs)

    def _pack(self, variables: Mapping[str, Any]) -> bytes:
        return tensors.pack({name: self.step_of.value(variable) for name, variable in variables.items()})

    def restore(self, state: Mapping[str, Any], parts: Mapping[str, bytes], totals: Totals) -> None:
        if self.step_of.average:  # a checkpoint without one begins with its weights
            self.notes += [] if "average" in parts else [NO_AVERAGE]
            self._fill(self.variables, parts.get("average", parts["model"]), "weights of another model")
            for average, weight in zip(self.step_of.average, self.step_of.averaged, strict=True):
                self.step_of.assign(average, self.step_of.value(weight))
        self._fill(self.variables, parts["model"], "weights of another model")
        if "optimizer" in parts:  # weights from another framework come alone
            rate = None if self.step_of.rate is None else str(self.step_of.rate)  # the job's own
            self._fill(self.memory, parts["optimizer"], "the memory of another optimizer", kept=rate)
        keras_callbacks.unpack(self.callbacks, parts)
        self.step_of.set_sums(totals)
        self._counted = totals.counted

    def _fill(self, variables: Mapping[str, Any], blob: bytes, contents: str, *, kept: str | None = None) -> None:
        expected = {name: self.step_of.value(variable) for name, variable in variables.items()}
        for name, value in tensors.arrays_for(blob, expected, contents).items():
            if name != kept:
                self.step_of.assign(variables[name], value)

    def from_first(self, data: bytes) -> bytes:
        return self.world.from_first(data)

    def all_have(self, number: int) -> bool:
        return self.world.all_have(number)

    def _share_statistics(self) -> None:
        """Running statistics differ from device to device; those of the (first) largest share count."""
        if not self.step_of.all_take_part:
            largest = self.shares.index(max(self.shares)) if self.shares else 0
            self.step_of.share_statistics(np.int32(largest))

    # The end

    def update_caller_model(self) -> None:
        """Write the current weights (or their average, if one is kept) into the caller's model."""
        with self.with_averaged_weights():
            for weight, variable in zip(self.job.model.weights, self.variables.values(), strict=True):
                weight.assign(self.step_of.value(variable))

    def close(self) -> None:
        """Write the weights and the optimizer's state into the caller's objects."""
        self._reader.shutdown()
        self._share_statistics()
        self.update_caller_model()
        for kept, variable in zip(self.job.optimizer.variables, self.memory.values(), strict=True):
            kept.assign(self.step_of.value(variable))
