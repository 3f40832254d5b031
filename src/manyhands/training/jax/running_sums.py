"""Loss and accuracy of an epoch, summed on the devices and read late.

Each step returns new arrays, so older sums can be read without waiting. JAX computes in 32 bits, where a long sum of
small numbers loses them: the loss is summed in two numbers, the second of which holds what the first has rounded away.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manyhands.training.running_sums import Figures

Sums = dict[str, Any]

_NEVER = 2**31 - 1  # the first bad step, as long as there is none


def from_figures(figures: Figures) -> Sums:
    """Sums to begin with, as NumPy's arrays."""
    first = np.float64(np.float32(figures.loss_sum))
    loss = [first, figures.loss_sum - first] if math.isfinite(figures.loss_sum) else [figures.loss_sum, 0.0]
    bad = _NEVER if figures.bad_step is None else figures.bad_step
    kind = np.float64 if jax.config.jax_enable_x64 else np.float32
    return {
        "loss": np.array(loss, kind),
        "counts": np.array([figures.correct, figures.count, bad], np.int32),
        "divisor": np.zeros(2, kind),
    }


def add(
    sums: Sums,
    loss: jax.Array,
    correct: jax.Array | None,
    count: int,
    step: jax.Array | int = 0,
    divisor: jax.Array | None = None,
) -> Sums:
    """The sums with one batch more: its mean loss and correct predictions.

    With a divisor the loss is no mean but a sum; all sums are divided by all divisors at the end (:func:`mean_of`).
    """
    kind = sums["loss"].dtype
    new = loss.astype(kind) * (count if divisor is None else 1)
    before = sums["counts"]
    bad = jnp.where(jnp.isfinite(loss), _NEVER, step)
    counts = [before[0] + (0 if correct is None else correct), before[1] + count, jnp.minimum(before[2], bad)]
    return {
        "loss": _longer(sums["loss"], new),
        "counts": jnp.stack([count.astype(jnp.int32) for count in counts]),
        "divisor": _longer(sums["divisor"], jnp.asarray(count if divisor is None else divisor, kind)),
    }


def _longer(sum_of_two: jax.Array, new: jax.Array) -> jax.Array:
    total, rounded = sum_of_two
    larger = total + new
    part = larger - total
    return jnp.stack([larger, rounded + ((total - (larger - part)) + (new - part))])


def is_ready(sums: Sums) -> bool:
    return all(leaf.is_ready() for leaf in sums.values())


def figures(sums: Sums, *, counted: bool) -> Figures:
    """The sums as figures; waits for them."""
    loss = np.asarray(sums["loss"], np.float64)  # manyhands: wait-ok they are ready, or an epoch ends
    correct, count, bad = map(int, np.asarray(sums["counts"]))  # manyhands: wait-ok likewise
    total = float(loss.sum()) if np.isfinite(loss).all() else math.nan
    return Figures(total, correct, count, None if bad == _NEVER else bad, counted)


def mean_of(sums: Sums, *, counted: bool) -> Figures:
    """The figures of an evaluation: its loss is divided once, by the sum of all divisors."""
    summed = figures(sums, counted=counted)
    divisor = float(np.asarray(sums["divisor"], np.float64).sum())
    return summed if divisor == summed.count else summed.weighed(divisor)
