"""TensorFlow's part of the trial whether a loss is a mean over samples (:mod:`manyhands.training.loss_trial`).

The model is a function of its weights here, so that none of its variables changes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.training import loss_trial
from manyhands.training.data.sources import Arrays, Batch
from manyhands.training.loss_trial import Pass, Term
from manyhands.training.tensorflow.function import Function
from manyhands.training.tensorflow.losses import Losses
from manyhands.training.tensorflow.objective import OwnStep


def check(function: Function, data: Arrays) -> str | None:
    """Refuse a loss whose parts do not add up; or say why that could not be tried."""
    few, seeds = loss_trial.unlike_samples(data), itertools.count()
    with _quiet(function.model), tf.device("/device:CPU:0"):
        weights = [tf.convert_to_tensor(variable.value) for variable in function.trained]
        kept = [tf.convert_to_tensor(variable.value) for variable in function.kept]

        def compute(rows: Sequence[int]) -> Pass:
            batch = few.prepare(tuple(map(tf.convert_to_tensor, few.rows(list(rows)))))
            return _pass(function, weights, kept, next(seeds), batch)

        precisions = {str(layer.compute_dtype) for layer in function.model._flatten_layers()}
        own_step = isinstance(function.objective, OwnStep)
        return loss_trial.check(compute, few.count, precisions=precisions, own_step=own_step)


def _pass(function: Function, weights: list[Any], kept: list[Any], seed: int, batch: Batch) -> Pass:
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(weights)
        losses, _ = function(weights, kept, (seed,), batch, training=True)
        terms = _terms(losses, len(batch[0]))
    gradients = [tape.gradient(total, weights, unconnected_gradients="zero") for total, _ in terms]
    arrays = [[tf.convert_to_tensor(one).numpy().astype(np.float64) for one in part] for part in gradients]
    return Pass([Term(float(total), float(count), part) for (total, count), part in zip(terms, arrays, strict=True)])


def _terms(losses: Losses, size: int) -> list[tuple[Any, Any]]:
    mean = [] if losses.mean is None else [(losses.mean * size, size)]
    total = [] if losses.total is None else [(losses.total.value, 0)]
    return mean + total + [(one.total, one.count) for one in losses.sums]


@contextlib.contextmanager
def _quiet(model: Any) -> Iterator[None]:
    """Layers that mix or disturb samples in training do not: parts would then differ, and rightly."""
    put_back = []
    for layer in model._flatten_layers():
        noisy = "Dropout" in type(layer).__name__ or isinstance(layer, keras.layers.GaussianNoise)
        for name in ("rate", "stddev"):
            if noisy and isinstance(getattr(layer, name, None), float):
                put_back.append((layer, name, getattr(layer, name)))
                object.__setattr__(layer, name, 0.0)
        if isinstance(layer, keras.layers.BatchNormalization):
            put_back.append((layer, "_trainable", layer._trainable))
            object.__setattr__(layer, "_trainable", False)
    try:
        yield
    finally:
        for layer, name, value in put_back:
            object.__setattr__(layer, name, value)
