"""Evaluation and prediction on all replicas, outputs on their way to the host, and Keras's own metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor
from manyhands.training.data.sources import Source
from manyhands.training.evaluation import pieces
from manyhands.training.evaluation.inputs import Inputs
from manyhands.training.evaluation.metrics import MetricCalls
from manyhands.training.evaluation.pieces import check_rows
from manyhands.training.learner import Take
from manyhands.training.running_sums import Figures
from manyhands.training.settings import Settings
from manyhands.training.tensorflow.data.feed import Feed
from manyhands.training.tensorflow.objective import Objective, Supervised
from manyhands.training.tensorflow.ranks.world import World
from manyhands.training.tensorflow.step.function import Function
from manyhands.training.tensorflow.step.step import BAD_STEP, CORRECT, COUNT, LOSS, MOST_SUMS, Step


class Evaluation:
    """A model's replicas, and the programs that compute with them without training."""

    def __init__(self, step: Step, world: World) -> None:
        self.step, self.world = step, world
        self.objective, self.batch_size = step.function.objective, step.settings.batch_size
        self._programs: dict[bool, Any] = {}  # with and without the model's outputs

    def figures(
        self, feed: Feed, alive: Callable[[], None], take: Take | None = None, *, counted: bool = False
    ) -> Figures:
        """Loss and accuracy, each sample counted once, whatever the number of devices."""
        self.step.set_sums(self.step.test_sums, Figures())
        with_outputs = take is not None
        if with_outputs not in self._programs:
            options: Any = {
                "on_host": feed.on_host,
                "with_outputs": with_outputs,
                "gathered": with_outputs and self.world.size > 1,
            }
            self._programs[with_outputs] = self.step.tester(prepared_by(feed.source), **options)
        whole, size = not self.objective.is_mean, pieces.batch_size_for(self.batch_size)
        if whole or (isinstance(self.objective, Supervised) and self.objective.is_sum):  # a sum grows with the batch
            size = pieces.whole_size(feed.source, self.batch_size)
        self._run(self._programs[with_outputs], feed, alive, _outputs(self.world, take), size, whole=whole)
        return self._tested(counted=counted)

    def predict(self, feed: Feed, alive: Callable[[], None], take: Take) -> None:
        """The model's outputs for all samples."""
        options: Any = {"on_host": feed.on_host, "gathered": self.world.size > 1}
        program = self.step.predictor(prepared_by(feed.source), **options)
        outputs = _outputs(self.world, take)
        self._run(
            lambda *arguments: (program(*arguments), ()), feed, alive, outputs, pieces.batch_size_for(self.batch_size)
        )

    def _run(
        self,
        program: Any,
        feed: Feed,
        alive: Callable[[], None],
        outputs: pieces.PendingOutputs,
        size: int,
        *,
        whole: bool = False,
    ) -> None:
        batches = feed.batches(Cursor(), size, 0, None, 1, whole=whole)
        loader = getattr(feed.source, "loader", None)
        for window, batch in loader_batches.agreed(batches, self._all_have, loader):
            outputs.add((program(batch.data, batch.order, batch.bounds), window.size))
            alive()
        outputs.finish()

    def _all_have(self, number: int) -> bool:
        return all(row == [number] for row in self.world.gather([number]))

    def _tested(self, *, counted: bool) -> Figures:
        """The figures over all processes; sums with a count of their own are divided now."""
        sums_here = np.sum([sums.numpy() for sums in self.step.on_each(self.step.test_sums)], axis=0)
        sums_here[BAD_STEP] = self.step.counts_correct or counted
        whole = np.sum(self.world.gather(sums_here.tolist()), axis=0)
        totals, counts = np.split(whole[BAD_STEP + 1 :], [MOST_SUMS])
        means = np.divide(totals, counts, out=np.zeros_like(totals), where=counts != 0)
        means[: self.step.sums_of_loss][counts[: self.step.sums_of_loss] == 0] = self.step.nothing_counts
        loss = whole[LOSS] + sum(means) * whole[COUNT]
        return Figures(float(loss), float(whole[CORRECT]), float(whole[COUNT]), counted=bool(whole[BAD_STEP]))


class Evaluator:
    """A model of the caller's and a data set, apart from any training."""

    def __init__(self, layers: Any, objective: Objective, data: Source, world: World, settings: Settings, check: Any):
        function = Function(layers, objective, settings.seed)
        self.rank, self.world = world.rank, world
        self.feed = Feed(data, world.strategy, world.devices, check)
        step = Step(world.strategy, function, None, (), settings)
        if world.size > 1:  # others may have drawn other weights than the first process
            for variable in (*step.weights, *step.statistics):
                replicas = step.on_each(variable)
                value = replicas[0].numpy()
                first = np.frombuffer(world.from_first(value.tobytes()), value.dtype).reshape(value.shape)
                for replica in replicas:
                    replica.assign(first)
        self.evaluation = Evaluation(step, world)

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Figures:
        return self.evaluation.figures(self.feed, alive, take)

    def predict(self, inputs: Inputs, alive: Callable[[], None], take: Take) -> None:
        self.evaluation.step.function.inputs = inputs
        self.evaluation.predict(self.feed, alive, take)

    def from_first(self, data: bytes) -> bytes:
        return self.world.from_first(data)


def prepared_by(source: Source) -> Any:
    return lambda batch: source.nested(source.prepare(batch))


def _outputs(world: World, take: Take | None) -> pieces.PendingOutputs:
    """Outputs and targets of each replica, with the size of their batch, on their way to ``take``.

    It gets NumPy's arrays, in the first process only. With several processes every replica has all rows.
    """

    def whole(rows: Any) -> Any:
        parts = [part.numpy() for part in world.strategy.experimental_local_results(rows)]
        return parts[0] if world.size > 1 or len(parts) == 1 else _joined(parts)

    def deliver(coming: tuple[Any, int]) -> None:
        pair, size = coming
        outputs, targets = tf.nest.map_structure(whole, pair)
        check_rows(outputs, size)
        assert take is not None
        take(outputs, None if isinstance(targets, tuple) and not targets else targets)

    return pieces.PendingOutputs(deliver if take is not None and world.first else None)


def _joined(parts: list[Any]) -> Any:
    filled = [part for part in parts if part.ndim and len(part)]
    return np.concatenate(filled) if filled else parts[0]


def own_meter(metric: Any) -> MetricCalls | None:
    """Keras's metrics, and functions that it knows by name (``"mae"``): a mean over samples."""
    if isinstance(metric, str):
        try:
            metric = keras.metrics.get(metric)
        except ValueError:  # Keras has none of this name
            return None
        metric = metric if isinstance(metric, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(metric)
    if not isinstance(metric, keras.metrics.Metric):
        return None
    return MetricCalls(
        metric.reset_state, lambda outputs, targets: metric.update_state(targets, outputs), metric.result
    )
