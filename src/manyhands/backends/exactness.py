"""Whether results are as exact as plain execution's: what is asked of code that rounds at other places.

A compiler adds in another order and keeps more or fewer digits in between, so its results are not plain execution's to
the bit. To ask that they be close to them is asking the wrong thing: in a deep net in bfloat16 plain execution itself
is far from what exact arithmetic gives, and two honest ways are as far from each other. The question is whether the
other way is *further from exact results* than plain execution is. In an example with three results, as norms:

    result     exact    plain is off by    ours is off by
    loss       2.3      0.004              0.006           a few numbers: one may be right by luck, so 4 roundings are
                                                           given on top
    weights    1.0      0.46               0.45            fine: twice 0.46 were allowed, but not as far as to nothing
    bias       1e-14    2e-6               9e-6            plain's is all error, and small beside other results: noise

A result may be off by twice what plain execution is off by, but by no more than half way from there to having no result
at all (all zeros are off by 1): so 0.73 for the weights. Noise is what plain execution gets no half of, if it is small
beside the largest result: it is measured against all such noise together. What plain execution gets no half of and is
*not* small says that the exact results are no measure (a function that is chaos, or an exact run that went astray).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import CannotBeExact

_TWICE = 2.0
_SMALL = 1e-2  # of the largest result: what is noise is no more


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one result, as norms: how far ours and plain execution's are from the exact one, and how large that is."""

    ours: float
    plain: float
    size: float
    floor: float  # what rounding alone may do, as a part of the size


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
        return f"{self.worst:.3g} times as far from exact results as plain execution"


def judge(results: Sequence[Distance]) -> Verdict:
    """Whether no result is further from the exact one than it may be; :class:`CannotBeExact` where that says nothing.

    >>> loss, weights = Distance(0.006, 0.004, 2.3, 0.03), Distance(0.45, 0.46, 1.0, 1e-5)
    >>> bias = Distance(9e-6, 2e-6, 1e-14, 1e-5)
    >>> judge([loss, weights, bias]).words
    'as exact as plain execution (0.98 of its error)'
    >>> judge([loss, Distance(1.0, 0.46, 1.0, 1e-5)]).words  # all zeros
    '2.17 times as far from exact results as plain execution'
    """
    largest = max((one.size for one in results), default=0.0)
    noise = [one.plain >= one.size / 2 and one.plain <= _SMALL * largest for one in results]
    level = max((one.plain for one, is_noise in zip(results, noise, strict=True) if is_noise), default=0.0)
    accepted, worst, ours, plain = True, 0.0, 0.0, 0.0
    for one, is_noise in zip(results, noise, strict=True):
        if is_noise:
            usual, limit = level + one.floor * largest, _TWICE * level + one.floor * largest
        elif one.plain < one.size:
            usual = one.plain + one.floor * one.size
            limit = min(_TWICE * one.plain, (one.plain + one.size) / 2) + one.floor * one.size
            ours += (one.ours / one.size) ** 2 + one.floor**2
            plain += (one.plain / one.size) ** 2 + one.floor**2
        else:
            raise CannotBeExact("plain execution itself has nothing in common with exact results")
        accepted &= one.ours <= limit
        worst = max(worst, one.ours / usual if usual else 0.0 if one.ours == 0 else float("inf"))
    return Verdict(accepted, (ours / plain) ** 0.5 if plain else 1.0, worst)
