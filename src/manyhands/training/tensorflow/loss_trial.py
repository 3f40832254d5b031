"""Do the parts of a batch add up to the whole? Tried on real samples, before a job begins.

On several devices, or with ``accumulate``, a batch is processed in parts, and their losses and gradients are put
together: means over samples weighted by samples, a ``LossSum`` by its counts. That is the loss of the whole batch
unless the loss is another kind of mean, and a user's function does not say. So loss and gradients are computed for some
samples at once, for each alone and for two halves, and must agree. The samples are as unlike as can be found: the one
with the most padding and the one with the least, labels of every kind. Halves have the small losses on one side, the
large ones on the other. Gradients are compared as well, because with a last layer of zeros all samples have the same
loss.

For example a mean over tokens, of two texts with 1 and 3 tokens whose losses are 4 and 2, 2, 2::

    whole   (4 + 2 + 2 + 2) / 4 = 2.5
    parts   (4 / 1 + 6 / 3) / 2 = 3.0     -> refused
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.errors import BadSettings
from manyhands.training.sources import Array, Arrays, Batch
from manyhands.training.tensorflow.function import Function
from manyhands.training.tensorflow.losses import Losses
from manyhands.training.tensorflow.objective import OwnStep

_FEW = 8  # samples that are tried
_POOL = 1024  # samples among which unlike ones are looked for
_WIDTH = 4096  # numbers of a sample that are looked at
_CLOSE = {"float64": 1e-7, "float32": 1e-4}
_OTHERWISE_CLOSE = 3e-2
_SMALL = 1e-3  # of all gradients: those of a weight that are smaller may be nothing but rounding


@dataclass(frozen=True)
class _Pass:
    """Losses and gradients of some samples: those of each term of the loss, and what a term is divided by."""

    totals: Array
    counts: Array
    gradients: list[list[Array]]  # of each term, for each weight

    @property
    def loss(self) -> float:
        return float(sum(self.totals / np.where(self.counts, self.counts, 1)))

    @property
    def gradient(self) -> list[Array]:
        divisors = np.where(self.counts, self.counts, 1)
        return [
            sum(g / d for g, d in zip(column, divisors, strict=True)) for column in zip(*self.gradients, strict=True)
        ]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(np.isfinite(one).all() for one in self.gradient)


def check(function: Function, batch: Batch) -> str | None:
    """Refuse a loss whose parts do not add up; or say why that could not be tried."""
    with _quiet(function.model), tf.device("/device:CPU:0"):
        weights = [tf.convert_to_tensor(variable.value) for variable in function.trained]
        kept = [tf.convert_to_tensor(variable.value) for variable in function.kept]

        def of(rows: Sequence[int], seed: int = 0) -> _Pass:
            picked = tuple(tf.gather(part, list(rows)) for part in batch)
            return _pass(function, weights, kept, seed, picked)

        size, close = len(batch[0]), _tolerance(function.model)
        whole, again = of(range(size)), of(range(size), seed=1)
        if not (whole.is_finite and again.is_finite):
            return "it is NaN for the samples that were tried"
        if _distance(whole, again, [again]) > close:
            return "it draws random numbers"
        if size < 2:
            return "there is only one sample"
        singles = [of([row]) for row in range(size)]
        order = sorted(range(size), key=lambda row: singles[row].loss)
        halves = [of(order[: size // 2]), of(order[size // 2 :])]
        for parts in (singles, halves):
            together = _together(parts)
            if together.is_finite and _distance(whole, together, parts) > close:
                raise BadSettings(_refusal(function.objective, whole.loss, together.loss, size, len(parts)))
    return None


def _pass(function: Function, weights: list[Any], kept: list[Any], seed: int, batch: Batch) -> _Pass:
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(weights)
        losses, _ = function(weights, kept, (seed,), batch, training=True)
        terms = _terms(losses, len(batch[0]))
    gradients = [tape.gradient(total, weights, unconnected_gradients="zero") for total, _ in terms]
    numbers = [[tf.convert_to_tensor(one).numpy().astype(np.float64) for one in part] for part in gradients]
    totals, counts = (np.array([float(one[place]) for one in terms]) for place in (0, 1))
    return _Pass(totals, counts, numbers)


def _terms(losses: Losses, size: int) -> list[tuple[Any, Any]]:
    mean = [] if losses.mean is None else [(losses.mean * size, size)]
    return mean + [(one.total, one.count) for one in losses.sums]


def _together(passes: Sequence[_Pass]) -> _Pass:
    gradients = [
        [sum(column) for column in zip(*terms, strict=True)]
        for terms in zip(*(one.gradients for one in passes), strict=True)
    ]
    totals, counts = (np.sum([getattr(one, name) for one in passes], axis=0) for name in ("totals", "counts"))
    return _Pass(totals, counts, gradients)


def _distance(whole: _Pass, other: _Pass, passes: Sequence[_Pass]) -> float:
    """How far apart two are, relative to the parts."""
    value: float = abs(whole.loss - other.loss) / (sum(abs(one.loss) for one in passes) / len(passes) or 1.0)
    norms = [[float(np.linalg.norm(one)) for one in part.gradient] for part in passes]
    scales = [max(column) for column in zip(*norms, strict=True)]
    least = _SMALL * math.hypot(*scales) or 1.0
    apart: list[float] = [float(np.linalg.norm(a - b)) for a, b in zip(whole.gradient, other.gradient, strict=True)]
    gaps: list[float] = [gap / max(scale, least) for gap, scale in zip(apart, scales, strict=True)]
    return max([value, *gaps])


def _tolerance(model: Any) -> float:
    kinds = {layer.compute_dtype for layer in model._flatten_layers()}
    return max(_CLOSE.get(str(kind), _OTHERWISE_CLOSE) for kind in kinds)


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


# Samples


def unlike(data: Arrays | tuple[Array, ...]) -> Batch:
    """A few samples of an array source, or of a loader's batch, that differ as much as possible."""
    arrays = data.arrays if isinstance(data, Arrays) else data
    pool = np.linspace(0, len(arrays[0]) - 1, min(len(arrays[0]), _POOL)).astype(np.int64)
    wishes = [list(_extremes(array[pool])) for array in reversed(arrays)]
    in_turns = [row for turn in itertools.zip_longest(*wishes) for row in turn if row is not None]
    spread = np.linspace(0, len(pool) - 1, min(len(pool), _FEW)).astype(int).tolist()
    rows = np.sort(pool[list(dict.fromkeys([*in_turns, *spread]))[:_FEW]])
    native = tuple(tf.convert_to_tensor(array[rows]) for array in arrays)
    return data.prepare(native) if isinstance(data, Arrays) else native


def _extremes(array: Array) -> Iterator[int]:
    """The rows of an array that are the furthest apart: by padding, by value, and by kind of label."""
    flat = array.reshape(len(array), -1)[:, :_WIDTH]
    if not flat.shape[1] or flat.dtype.kind not in "biuf":
        return
    if flat.dtype.kind != "f":
        kinds, firsts, counts = np.unique(flat, return_index=True, return_counts=True)
        padding = (flat == kinds[counts.argmax()]).sum(1)
        yield from (int(padding.argmax()), int(padding.argmin()))
        lowest = (flat == kinds[0]).sum(1)
        yield from (int(lowest.argmax()), int(lowest.argmin()))
        if flat.shape[1] == 1:
            yield from firsts[:: max(1, len(kinds) // _FEW)].tolist()
    means = flat.mean(1, dtype=np.float64)
    if np.isfinite(means).all():
        yield from (int(means.argmax()), int(means.argmin()))


def _refusal(objective: Any, whole: float, parts: float, size: int, number: int) -> str:
    if isinstance(objective, OwnStep):
        advice = "return the sum and what it is divided by from training_step: mh.LossSum(total, count)"
    else:
        advice = (
            "let the loss return the sum and what it is divided by, mh.LossSum(total, count); or one number per "
            "sample, of which the trainer takes the mean"
        )
    values = f"it is {whole:.6g} for {size} samples, and {parts:.6g} put together from {number} parts of them"
    if math.isclose(whole, parts, rel_tol=1e-4):
        values = f"the gradients of {size} samples are not those of {number} parts of them put together"
    return (
        f"the loss is not a mean over the samples of a batch: {values}. On several devices, or with accumulate, a "
        "batch is processed in parts, and this loss would then train another model than one device does. Please "
        f"{advice}"
    )
