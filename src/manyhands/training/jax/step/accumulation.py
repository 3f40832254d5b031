"""Gradient accumulation: a batch in micro-batches, one after the other, for the update of the whole batch.

The loss of a micro-batch is a mean over its samples, or a sum and its count; sums and counts are added up, and so are
the gradients of the sums. Ten samples with ``accumulate=3`` are micro-batches of 4, 4 and 2::

    total       4 a + 4 b + 2 c        a, b, c: the mean losses
    count       4 + 4 + 2
    loss        total / count          the mean over all ten

Micro-batches of equal size are one loop of the compiled program (``lax.scan``), so activations of only one of them are
in memory; a shorter last one follows it. A micro-batch takes every k-th row of the batch, so that each device has a
part of it. With uneven shares micro-batches differ in which rows count, and the loop is unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from manyhands.training.jax.step.division import Division


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """Of the micro-batches so far: the loss as a sum and a count, correct predictions, gradients of the sum."""

    total: Any
    count: Any
    correct: Any
    gradients: Any
    numbers: Any  # the model's random numbers and statistics after them


# From rows, the numbers of the model before them and which rows count, to their sum and the numbers after them.
Work = Callable[[Any, Any, NDArray[np.bool_] | None], Sum]


def accumulated(work: Work, rows: Any, numbers: Any, division: Division, parts: int) -> Sum:
    """The sum over all micro-batches of a batch, whose rows are a tree of arrays."""
    if division.weights is not None:
        return _unrolled(work, rows, numbers, division.weights, parts)
    size = -(-division.size // parts)
    loops, rest = divmod(division.size, size)

    def in_loops(array: jax.Array) -> jax.Array:
        return jnp.swapaxes(array[: loops * size].reshape(size, loops, *array.shape[1:]), 0, 1)

    def body(so_far: Sum, micro: Any) -> tuple[Sum, None]:
        return _plus(so_far, work(micro, so_far.numbers, None)), None

    micro_batches = jax.tree.map(in_loops, rows)
    shapes = jax.eval_shape(lambda: work(jax.tree.map(lambda array: array[0], micro_batches), numbers, None))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    so_far = Sum(nothing.total, nothing.count, nothing.correct, nothing.gradients, numbers)
    so_far, _ = jax.lax.scan(body, so_far, micro_batches)
    if rest:
        so_far, _ = body(so_far, jax.tree.map(lambda array: array[loops * size :], rows))
    return so_far


def _unrolled(work: Work, rows: Any, numbers: Any, weights: NDArray[np.bool_], parts: int) -> Sum:
    so_far: Sum | None = None
    for part in range(min(parts, len(weights))):
        samples = weights[part::parts]
        if not samples.any():
            continue
        micro = jax.tree.map(lambda array, part=part: array[part::parts], rows)
        now = work(micro, numbers if so_far is None else so_far.numbers, samples)
        so_far = now if so_far is None else _plus(so_far, now)
    assert so_far is not None  # a batch has samples
    return so_far


def _plus(so_far: Sum, now: Sum) -> Sum:
    gradients = jax.tree.map(jnp.add, so_far.gradients, now.gradients)
    return Sum(so_far.total + now.total, so_far.count + now.count, so_far.correct + now.correct, gradients, now.numbers)
