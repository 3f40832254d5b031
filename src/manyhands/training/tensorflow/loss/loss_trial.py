"""TensorFlow's part of the trial whether a loss is a mean over samples (:mod:`manyhands.training.loss.loss_trial`).

The model is a function of its weights here, so that none of its variables changes, and traced once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.training.data.loader_batches import preserve_host_random_state
from manyhands.training.data.sources import Arrays
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import Pass, Term
from manyhands.training.tensorflow.loss.keras_losses import Losses
from manyhands.training.tensorflow.objective import OwnStep
from manyhands.training.tensorflow.step.function import Function


def try_loss(function: Function, data: Arrays) -> str | None:
    """Refuse a loss whose parts do not add up; or say why that could not be tried."""
    chosen, seeds = loss_trial.choose(data), itertools.count()
    with (
        _quiet(function.model),
        _variables_preserved(function),
        preserve_host_random_state(),
        tf.device("/device:CPU:0"),
    ):
        graph = _graph(function, data)

        def compute(batch: Sequence[int], rows: Sequence[int]) -> Pass:
            arrays = data.rows([batch[row] for row in rows])
            terms = graph(tf.constant(next(seeds)), *map(tf.convert_to_tensor, arrays))
            return Pass([_term(*term) for term in terms])

        precisions = {str(layer.compute_dtype) for layer in function.model._flatten_layers()}
        own_step = isinstance(function.objective, OwnStep)
        batches = [(functools.partial(compute, batch), len(batch)) for batch in chosen]
        return loss_trial.check(batches, precisions, own_step=own_step)


def _graph(function: Function, data: Arrays) -> Any:
    """The terms of the loss with their gradients, traced once: the user's code runs for no pass but the first."""
    weights = [tf.convert_to_tensor(variable.value) for variable in function.trained]
    statistics = [tf.convert_to_tensor(variable.value) for variable in function.statistics]

    def work(seed: Any, *arrays: Any) -> list[tuple[Any, Any, list[Any]]]:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(weights)
            losses, _ = function(weights, statistics, (seed,), data.nested(data.prepare(arrays)), training=True)
            terms = _terms(losses, tf.shape(arrays[0])[0])
        gradients = [tape.gradient(total, weights, unconnected_gradients="zero") for total, _ in terms]
        dense = [[tf.convert_to_tensor(gradient) for gradient in part] for part in gradients]
        return [(total, count, part) for (total, count), part in zip(terms, dense, strict=True)]

    parts = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data.arrays]
    return tf.function(work, autograph=False, input_signature=[tf.TensorSpec([], tf.int32), *parts])


def _terms(losses: Losses, size: Any) -> list[tuple[Any, Any]]:
    mean = [] if losses.mean is None else [(losses.mean * tf.cast(size, losses.mean.dtype), size)]
    total = [] if losses.total is None else [(losses.total.value, tf.constant(0))]
    return mean + total + [(loss_sum.total, loss_sum.count) for loss_sum in losses.sums]


def _term(total: Any, count: Any, gradients: Sequence[Any]) -> Term:
    return Term(float(total), float(count), [gradient.numpy().astype(np.float64) for gradient in gradients])


@contextlib.contextmanager
def _variables_preserved(function: Function) -> Iterator[None]:
    """Variables that Keras does not know get their values back."""
    before = [(variable, variable.numpy()) for _, variable in function.unknown]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


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
