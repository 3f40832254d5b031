"""Whether results are as exact as plain execution's: the rule for code that rounds in other places.

A compiler adds in another order and keeps more or fewer digits in between, so its results are not plain execution's to
the bit. To ask whether they are close would be the wrong question: in a deep net in bfloat16 plain execution itself is
far from what exact arithmetic gives, and two correct ways are as far from each other. The question is whether the other
way is *further from exact results* than plain execution is. In an example with four results, as norms:

    result         exact   plain is off by   ours is off by
    loss           2.3     0.004             0.006
    first weights  1.0     0.46              0.45             fine: 0.73 are allowed
    last weights   1.0     0.01              0.05             luck: 0.07 are allowed
    a bias         1e-14   2e-6              3e-6             noise: 4e-6 are allowed

A result may be off by twice what plain execution is off by, but by no more than half way from there to having no result
at all (all zeros are off by the whole size): so 0.73 for the first weights.

Luck: rounding may turn a number just above zero into one just below, where the derivative of a ReLU jumps. In a deep
net that happens somewhere, and it is chance whether the results behind it are right to the last digit or off by a
thousandth. So each result may be off by as much more as plain execution's least exact result is, up to a limit (a
twentieth in bfloat16); and by what one such jump causes, where a function has jumps at all. And a few numbers may be
right by chance: they may be off by some roundings more.

A tensor that is written to is judged by its change: a training step changes a thousandth of a weight, and compared with
the whole weight an update that was never made would look like luck.

Noise: where plain execution is off by at least half of the exact result, and by little compared with the largest
result, as for the gradient of a bias that a BatchNorm cancels. All such results are judged together. Where plain
execution is off by a whole result that is *not* noise, the exact results cannot serve as a measure (the function is
chaotic, or the exact run went wrong).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TWICE = 2.0
_SMALL = 1e-2  # of the largest result: what is noise is no more


class CannotBeExact(RuntimeError):
    """A function that cannot be run in higher precision, to check its results, or whose check says nothing."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one result, as norms: how far ours and plain execution's are from the exact one, and how large that is."""

    planned: float
    plain: float
    size: float
    floor: float  # what rounding alone may do, as a part of the size
    whole: float = 0.0  # where the size is that of a change: the size of what is changed


@dataclass(frozen=True, slots=True)
class Verdict:
    """``error`` is ours over plain execution's, all results together; ``worst`` that of the worst result."""

    accepted: bool
    error: float
    worst: float

    @property
    def words(self) -> str:
        """In words, after the name of a way."""
        if self.accepted:
            return f"as exact as plain execution ({self.error:.2f} of its error)"
        if math.isinf(self.worst):
            return "different where it must be equal: in a result's shape, dtype, integers, zeros, infinities or NaNs"
        return f"{self.worst:.3g} times as far from exact results as plain execution"


def judge(results: Sequence[Distance], max_luck: float, jump: float = 0.0) -> Verdict:
    """Whether no result is further from the exact one than it may be; :class:`CannotBeExact` where that says nothing.

    ``jump`` is what a single jump of the function may make of a result, as a part of its size.

    >>> loss, first = Distance(0.006, 0.004, 2.3, 0.03), Distance(0.45, 0.46, 1.0, 1e-5)
    >>> last, bias = Distance(0.05, 0.01, 1.0, 1e-5), Distance(3e-6, 2e-6, 1e-14, 1e-5)
    >>> judge([loss, first, last, bias], max_luck=0.05).words
    'as exact as plain execution (0.98 of its error)'
    >>> judge([loss, Distance(1.0, 0.46, 1.0, 1e-5)], max_luck=0.05).words  # all zeros
    '1.96 times as far from exact results as plain execution'
    >>> judge([loss, Distance(math.inf, 0.0, 1.0, 0.0)], max_luck=0.05).words  # of another dtype
    "different where it must be equal: in a result's shape, dtype, integers, zeros, infinities or NaNs"
    """
    largest = max((max(result.size, result.whole) for result in results), default=0.0)
    noise = [result for result in results if _is_noise(result, largest)]
    others = [result for result in results if not _is_noise(result, largest)]
    if any(other.plain >= other.size for other in others):
        raise CannotBeExact("plain execution itself has nothing in common with exact results")
    level = max((result.plain for result in noise), default=0.0)
    luck = min(max_luck, max(map(_luck, others), default=jump))
    luck = max(luck, jump)
    accepted, worst = True, 0.0
    for result in noise:
        more = result.floor * largest
        accepted &= result.planned <= _TWICE * level + more
        worst = max(worst, _times(result.planned, level + more))
    for result in others:
        more = (result.floor + luck) * result.size
        accepted &= result.planned <= min(_TWICE * result.plain + more, (result.plain + result.size) / 2)
        worst = max(worst, _times(result.planned, result.plain + more))
    planned, plain = (
        (math.hypot(*values) for values in zip(*map(_relative, others), strict=True)) if others else (1.0, 1.0)
    )
    return Verdict(accepted, _times(planned, plain), worst)


def _is_noise(distance: Distance, largest: float) -> bool:
    return distance.plain >= distance.size / 2 and distance.plain <= _SMALL * largest


def _luck(distance: Distance) -> float:
    """How inexact plain execution is; of a change without the rounding of what is changed, which says nothing."""
    return (distance.plain - (distance.floor * distance.size if distance.whole else 0.0)) / distance.size


def _relative(distance: Distance) -> tuple[float, float]:
    return math.hypot(distance.planned / distance.size, distance.floor), math.hypot(
        distance.plain / distance.size, distance.floor
    )


def _times(planned: float, plain: float) -> float:
    return planned / plain if plain else 1.0 if planned == 0 else math.inf
