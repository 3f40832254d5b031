"""Evaluation and prediction on all replicas, outputs on their way to the host, and Keras's own metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import Source, prepared_by
from manyhands.training.evaluation.metrics import (
    MetricCalls,
    Metrics,
    PendingOutputs,
    batch_size_for,
    check_rows,
    name_of,
    whole_size,
)
from manyhands.training.learner import Take
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals
from manyhands.training.tensorflow.model import Function
from manyhands.training.tensorflow.objective import ACCURACY, Objective, compiled_metrics, inputs_for
from manyhands.training.tensorflow.step import CORRECT, COUNT, LOSS, PLAIN, WIDTH, Feed, TrainingStep
from manyhands.training.tensorflow.world import World


class Evaluation:
    """A model's replicas and a data set, and the programs that compute with them without training."""

    def __init__(self, step: TrainingStep, world: World, data: Source, check: Any) -> None:
        """``check`` looks at the labels of a loader's batches."""
        self.step, self.world, self.rank = step, world, world.rank
        self.feed = Feed(data, world.replicas, check)
        self._programs: dict[bool, Any] = {}  # with and without the model's outputs

    def evaluate(self, alive: Callable[[], None], take: Take | None = None, *, counted: bool = False) -> Totals:
        """Loss and accuracy, each sample counted once, whatever the number of devices."""
        self.step.assign(self.step.test_sums, np.zeros(WIDTH))
        if (take is not None) not in self._programs:
            inputs = None if take is None else inputs_for(self.step.function.model, None)
            self._programs[take is not None] = self._program(inputs, loss=True)
        whole, batch_size = not self.step.function.objective.is_mean, self.step.settings.batch_size
        size = whole_size(self.feed.source, batch_size) if whole else batch_size_for(batch_size)
        self._run(self._programs[take is not None], alive, take, size, whole=whole)
        return self._totals(counted=counted)

    def predict(self, inputs: ModelInputs, alive: Callable[[], None], take: Take) -> None:
        """The model's outputs for all samples."""
        size = batch_size_for(self.step.settings.batch_size)
        self._run(self._program(inputs, loss=False), alive, take, size)

    def from_first(self, data: bytes) -> bytes:
        return self.world.from_first(data)

    def _program(self, inputs: ModelInputs | None, *, loss: bool) -> Any:
        gathered = inputs is not None and self.world.size > 1
        prepare = prepared_by(self.feed.source)
        return self.step.tester(prepare, loss=loss, inputs=inputs, gathered=gathered)

    def _run(
        self, program: Any, alive: Callable[[], None], take: Take | None, size: int, *, whole: bool = False
    ) -> None:
        outputs = _outputs(self.world, take)
        batches = self.feed.batches(Cursor(), size, 0, None, 1, whole=whole)
        for window, batch in loader_batches.check_agreement(batches, self.world.all_have):
            outputs.add((program(batch.data, batch.order, batch.bounds), window.size))
            alive()
        outputs.finish()

    def _totals(self, *, counted: bool) -> Totals:
        """The totals over all processes; sums with a count of their own are divided now."""
        sums_here = np.sum([sums.numpy() for sums in self.step.on_each(self.step.test_sums)], axis=0)
        whole = np.sum(self.world.gather([*sums_here, self.step.counts_correct or counted]), axis=0)
        totals, counts = whole[PLAIN:-1].reshape(2, -1)[:, : self.step.sums_of_loss]
        with np.errstate(invalid="ignore"):  # the mean of a LossSum in which nothing counts is NaN
            loss = whole[LOSS] + np.sum(totals / counts) * whole[COUNT]
        return Totals(float(loss), float(whole[CORRECT]), float(whole[COUNT]), counted=bool(whole[-1]))


def apart(model: Any, objective: Objective, data: Source, world: World, settings: Settings, check: Any) -> Evaluation:
    """The evaluation of a caller's model, apart from any training."""
    step = TrainingStep(world.strategy, Function(model, objective, settings.seed), None, (), settings)
    step.copy_from_first(world)
    return Evaluation(step, world, data, check)


def _outputs(world: World, take: Take | None) -> PendingOutputs:
    """Outputs and targets of each replica, with the size of their batch, on their way to ``take``.

    It gets NumPy's arrays, in the first process only. With several processes every replica has all rows.
    """

    def whole(rows: Any) -> Any:
        parts = [part.numpy() for part in world.strategy.experimental_local_results(rows)]
        return parts[0] if world.size > 1 or len(parts) == 1 else _join(parts)

    def deliver(coming: tuple[Any, int]) -> None:
        pair, size = coming
        outputs, targets = tf.nest.map_structure(whole, pair)
        check_rows(outputs, size)
        assert take is not None
        take(outputs, None if isinstance(targets, tuple) and not targets else targets)

    return PendingOutputs(deliver if take is not None and world.first else None)


def _join(parts: list[Any]) -> Any:
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


def with_compiled(metrics: Metrics, model: Any) -> Metrics:
    """The trainer's metrics, and those that the model was compiled with, under the names that Keras gives them."""
    names = compiled_names(model)
    if not names:
        return metrics
    compiled = model._compile_metrics

    def result() -> dict[str, Any]:
        counted = ACCURACY if len(compiled._flat_metrics) == 1 else ()
        return {name: value for name, value in compiled.result().items() if name not in counted}

    def update(outputs: Any, targets: Any) -> None:
        compiled.update_state(targets, outputs)

    meter = MetricCalls(compiled.reset_state, update, result)
    return Metrics({"": meter, **metrics.meters}, (*names, *metrics.names))


def compiled_names(model: Any) -> list[str]:
    """The names of the compiled metrics. The trainer counts the accuracy of a single output itself."""
    given = [name_of(metric) for metric in compiled_metrics(model)]
    outputs = getattr(model, "output_names", None)  # a property, where somebody gives the class of a model
    if isinstance(outputs, (list, tuple)) and len(outputs) > 1:
        return [f"{output}_{name}" for output in outputs for name in given]
    return [name for name in given if name not in ACCURACY]
