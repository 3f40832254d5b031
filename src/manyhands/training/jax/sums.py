"""Loss and accuracy of an epoch, summed on the devices and read late.

A step gives them anew, so an older one can be looked at without waiting. JAX computes in 32 bits, where a long sum of
small numbers loses them: the loss is summed in two numbers, the second of which holds what the first has rounded away.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manyhands.training.figures import Figures

Sums = dict[str, Any]

_NEVER = 2**31 - 1  # the first bad step, as long as there is none


def from_figures(figures: Figures) -> Sums:
    """Sums to begin with, as NumPy's arrays."""
    first = np.float64(np.float32(figures.loss_sum))
    kept = [first, figures.loss_sum - first] if math.isfinite(figures.loss_sum) else [figures.loss_sum, 0.0]
    bad = _NEVER if figures.bad_step is None else figures.bad_step
    return {
        "loss": np.array(kept, np.float64 if jax.config.jax_enable_x64 else np.float32),
        "counts": np.array([figures.right, figures.count, bad], np.int32),
    }


def add(sums: Sums, loss: jax.Array, right: jax.Array | None, count: int, step: jax.Array | int = 0) -> Sums:
    """The sums with one batch more: its mean loss and right answers."""
    total, rounded = sums["loss"]
    new = loss.astype(total.dtype) * count
    larger = total + new
    part = larger - total
    rounded = rounded + ((total - (larger - part)) + (new - part))
    before = sums["counts"]
    bad = jnp.where(jnp.isfinite(loss), _NEVER, step)
    counts = [before[0] + (0 if right is None else right), before[1] + count, jnp.minimum(before[2], bad)]
    return {"loss": jnp.stack([larger, rounded]), "counts": jnp.stack([one.astype(jnp.int32) for one in counts])}


def is_there(sums: Sums) -> bool:
    return all(leaf.is_ready() for leaf in sums.values())


def figures(sums: Sums, *, counted: bool) -> Figures:
    """What the sums say; waits for them."""
    loss = np.asarray(sums["loss"], np.float64)
    right, count, bad = map(int, np.asarray(sums["counts"]))
    total = float(loss.sum()) if np.isfinite(loss).all() else math.nan
    return Figures(total, right, count, None if bad == _NEVER else bad, counted)
