"""Outputs of a Keras model, replica by replica, on their way to the host; and Keras's own metrics."""

from __future__ import annotations

from collections import deque
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.training.evaluation.pieces import check_rows
from manyhands.training.learner import Take
from manyhands.training.tensorflow.world import World


class Outputs:
    """What each step of an evaluation or prediction gives, as NumPy's arrays; read one batch late.

    ``take`` gets outputs and targets, in the first process only. With several processes every replica has all rows.
    """

    def __init__(self, world: World, take: Take | None) -> None:
        self.world, self.take_pair = world, take if world.first else None
        self._coming: deque[tuple[Any, int]] = deque()

    def add(self, pair: Any, size: int) -> None:
        """Outputs and targets of the next batch, of each replica."""
        if self.take_pair is None:
            return
        self._coming.append((pair, size))
        if len(self._coming) > 1:
            self._arrive()

    def finish(self) -> None:
        while self._coming:
            self._arrive()

    def _arrive(self) -> None:
        assert self.take_pair is not None
        pair, size = self._coming.popleft()
        outputs, targets = tf.nest.map_structure(self._whole, pair)
        check_rows(outputs, size)
        self.take_pair(outputs, None if isinstance(targets, tuple) and not targets else targets)

    def _whole(self, rows: Any) -> Any:
        parts = [part.numpy() for part in self.world.strategy.experimental_local_results(rows)]
        return parts[0] if self.world.size > 1 or len(parts) == 1 else _joined(parts)


def _joined(parts: list[Any]) -> Any:
    filled = [part for part in parts if part.ndim and len(part)]
    return np.concatenate(filled) if filled else parts[0]


class OfKeras:
    """A metric of Keras's: ``update_state(y_true, y_pred)``, ``result()``, ``reset_state()``."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def reset(self) -> None:
        self.metric.reset_state()

    def update(self, outputs: Any, targets: Any) -> None:
        self.metric.update_state(targets, outputs)

    def result(self) -> Any:
        return self.metric.result()


def own_meter(metric: Any) -> OfKeras | None:
    """Keras's metrics, and functions that it knows by name (``"mae"``): a mean over samples."""
    if isinstance(metric, str):
        metric = keras.metrics.get(metric)
        metric = metric if isinstance(metric, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(metric)
    return OfKeras(metric) if isinstance(metric, keras.metrics.Metric) else None
