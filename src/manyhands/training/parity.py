"""Does training on N devices give what one device gives? Trained and compared, with numbers.

In float64 after 50 steps the two agree to about 1e-15; in float32 only the first steps can be compared, because small
differences of rounding grow without bound. A short last batch and uneven shards are always among the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """One training on several devices held against the one on one device."""

    precision: str
    steps: int
    devices: int
    shares: Sequence[float] | None
    difference: float
    limit: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.limit


@dataclass(frozen=True)
class Trial:
    precision: Literal["fp64", "fp32"]
    steps: int
    limit: float


@dataclass(frozen=True)
class Way:
    """One training of a comparison: on how many devices, with how much of the data, for how long."""

    devices: int
    shares: Sequence[float] | None
    precision: Literal["fp64", "fp32"]
    samples: int
    batch_size: int
    epochs: int


TRIALS = (Trial("fp64", 50, 1e-12), Trial("fp32", 5, 1e-5))


def compare(
    train: Callable[[Way], Mapping[str, Any]],
    samples: int,
    devices: int,
    *,
    batch_size: int = 32,
    trials: Sequence[Trial] = TRIALS,
) -> list[Comparison]:
    """Train on 1 and on N devices, evenly and unevenly, and compare all that the models hold.

    ``train`` trains a fresh copy of one model in the given way, with an optimizer that has a memory, so that
    differences of early steps would show; it gives the model's tensors by name.
    """
    uneven = [float(devices - rank) for rank in range(devices)]
    found = []
    for trial in trials:
        count, epochs = _extent(samples, batch_size, trial.steps)
        steps = epochs * -(-count // batch_size)
        alone = train(Way(1, None, trial.precision, count, batch_size, epochs))
        for shares in (None, uneven):
            several = train(Way(devices, shares, trial.precision, count, batch_size, epochs))
            difference = largest_difference(several, alone)
            found.append(Comparison(trial.precision, steps, devices, shares, difference, trial.limit))
    return found


def _extent(count: int, batch_size: int, steps: int) -> tuple[int, int]:
    """How many samples, and how many epochs of them: at least so many steps, and the last of an epoch is short."""
    short = max(1, batch_size // 3)
    count = min(count, batch_size * steps - short)
    if count % batch_size == 0 and count > short:
        count -= short
    return count, -(-steps // -(-count // batch_size))


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest relative difference of two sets of tensors, tensor by tensor.

    Relative to the tensor's norm; to a thousandth per element where that is smaller (biases that are zero up to
    noise have no relative difference).
    """
    worst = 0.0
    for name, right in other.items():
        a, b = np.asarray(one[name]), np.asarray(right)
        if np.issubdtype(b.dtype, np.floating):
            a, b = a.astype(np.float64), b.astype(np.float64)
            floor = 1e-3 * b.size**0.5
            distance = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), floor)
            worst = max(worst, distance if distance == distance else float("inf"))
        elif not np.array_equal(a, b):
            worst = float("inf")
    return worst
