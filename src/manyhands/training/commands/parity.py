"""Does training on N devices give the same weights as on one? Trains both ways and compares.

In float64 the two agree to about 1e-15 after 50 steps; in float32 only the first steps can be compared, because small
rounding differences grow without bound. The steps always include a short last batch and uneven shards. Samples are
taken from all of the data: in sorted data the first ones may all have the same length, and a mean over tokens would
look like a mean over samples. The trainer refuses such a loss on N devices, and the comparison ends with its message.

With ReLUs even the first steps may differ in float32: one value in a million is so close to zero that its last bit
decides on which side of a ReLU it is, and so whether it has a gradient. N devices add in another order, so their last
bits differ. Whether that explains a difference is measured, not assumed: both are compared to the same steps in
float64. One device is trained again, up to sixteen times, from weights that differ only in their last bit
(:func:`nudged`), to measure the error of float32. N devices may be about that far from float64, but never further than
half of the norm of a tensor: an error that large would excuse anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
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
    # Measured where the difference is beyond the limit: how far N devices are from the same steps in float64, and how
    # far one device is, at most.
    error: float = float("inf")
    error_alone: float = 0.0

    @property
    def equal(self) -> bool:
        """Within the limit; or not further from float64 than one device is."""
        return self.difference <= self.limit or self.error <= min(_LIKE_ONE * self.error_alone, _NEVER)

    @property
    def words(self) -> str:
        """The verdict; a difference beyond the limit is never called equal."""
        if self.difference <= self.limit:
            return "equal"
        verdict = "beyond the limit, as near to float64 as one device" if self.equal else "NOT EQUAL"
        far = f" ({self.error:.1e}, one device up to {self.error_alone:.1e})" if self.error_alone else ""
        return verdict + far


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
    # A seed for :func:`nudged`: the first weights differ in their last bit.
    nudge: int | None = None


_NUDGES = 16  # at most; enough when they explain a difference
_LIKE_ONE = 3.0  # the largest of a few errors is not the largest there is
_NEVER = 0.5  # of all that there is: weights of nothing but zeros are off by 1, NaN by more than anything
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
    comparisons = []
    for trial in trials:
        count, epochs = _extent(samples, batch_size, trial.steps)
        steps = epochs * -(-count // batch_size)
        plain = Way(1, None, trial.precision, count, batch_size, epochs)
        alone = train(plain)
        yardstick = _Float64Reference(train, plain, alone)
        for shares in (None, uneven):
            several = train(replace(plain, devices=devices, shares=shares))
            difference = largest_difference(several, alone)
            comparison = Comparison(trial.precision, steps, devices, shares, difference, trial.limit)
            comparisons.append(yardstick.judged(comparison, several) if trial.precision == "fp32" else comparison)
    return comparisons


def drawing_layers(layers: Iterable[Any]) -> list[str]:
    """Layers that drop values randomly in training, as ``Dropout(0.5)``, of any framework."""
    shown: dict[str, None] = {}
    for layer in layers:
        kind = type(layer).__name__
        named = "drop" in kind.lower()  # Dropout, AlphaDropout, SpatialDropout2D, DropPath
        rates = [getattr(layer, name, None) for name in (("p", "rate", "_rate") if named else ("dropout",))]
        rate = next((rate for rate in rates if isinstance(rate, Real) and not isinstance(rate, bool)), 0)
        if rate:
            shown[f"{kind}({rate:g})" if named else f"{kind}(dropout={rate:g})"] = None
    return list(shown)


class _Float64Reference:
    """How far one device is from float64; made when it is asked for."""

    def __init__(self, train: Callable[[Way], Mapping[str, Any]], plain: Way, alone: Mapping[str, Any]) -> None:
        self._train, self._plain, self._alone = train, plain, alone
        self._exact: Mapping[str, Any] | None = None
        self._error, self._nudges = 0.0, 0

    def judged(self, comparison: Comparison, several: Mapping[str, Any]) -> Comparison:
        if comparison.equal:
            return comparison
        if self._exact is None:
            self._exact = self._train(replace(self._plain, precision="fp64"))
            self._error = largest_difference(self._alone, self._exact)
        comparison = replace(comparison, error=largest_difference(several, self._exact), error_alone=self._error)
        while not comparison.equal and self._nudges < _NUDGES:
            nudged_run = self._train(replace(self._plain, nudge=self._nudges))
            self._nudges += 1
            self._error = max(self._error, largest_difference(nudged_run, self._exact))
            comparison = replace(comparison, error_alone=self._error)
        return comparison


def nudged(values: Any, seed: int | None) -> Any:
    """Every number moved to one of its two neighbours at random; unchanged without a seed, or if not floats."""
    numbers = np.asarray(values)
    if seed is None or not np.issubdtype(numbers.dtype, np.floating):
        return numbers
    up = np.random.default_rng([seed, numbers.size]).integers(0, 2, numbers.shape).astype(bool)
    towards = np.where(up, np.inf, -np.inf).astype(numbers.dtype)
    return np.asarray(np.nextafter(numbers, towards), numbers.dtype)


def _extent(count: int, batch_size: int, steps: int) -> tuple[int, int]:
    """How many samples, and how many epochs of them: at least this many steps, and the last of an epoch is short."""
    short = max(1, batch_size // 3)
    count = min(count, batch_size * steps - short)
    if count % batch_size == 0 and count > short:
        count -= short
    return count, -(-steps // -(-count // batch_size))


def largest_difference(tensors: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest relative difference of two sets of tensors, tensor by tensor.

    Relative to the tensor's norm; to a thousandth per element where that is smaller (biases that are zero up to
    noise have no relative difference).
    """
    worst = 0.0
    for name, tensor in other.items():
        a, b = np.asarray(tensors[name]), np.asarray(tensor)
        if np.issubdtype(b.dtype, np.floating):
            a, b = a.astype(np.float64), b.astype(np.float64)
            floor = 1e-3 * b.size**0.5
            distance = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), floor)
            worst = max(worst, distance if distance == distance else float("inf"))
        elif not np.array_equal(a, b):
            worst = float("inf")
    return worst
