"""How many samples each device gets.

The largest remainder method turns shares into whole samples: each device gets its exact amount rounded down, and the
samples left over go, one each, to the devices with the largest remainders (on a tie, to the earlier device). Ten
samples in shares 0.5, 0.3, 0.2 are 5, 3, 2. For seven samples the exact amounts are 3.5, 2.1, 1.4, so 3, 2, 1, and the
one left over goes to the first device: 4, 2, 1. With equal shares, ten samples on three devices are 4, 3, 3.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from fractions import Fraction

from manyhands.amounts import count_of
from manyhands.errors import BadShares


def check(shares: Sequence[float], count: int | None = None) -> list[Fraction]:
    """The shares as exact fractions of one; raises if they are not valid shares (for ``count`` devices).

    They are parts of one, maybe rounded (``[0.33, 0.33, 0.33]``), or whole numbers in any ratio (``[7, 3]``).
    """
    try:
        values = list(shares)
    except TypeError:
        raise BadShares(f"shares={shares!r}: give a list with one number per device, as [0.7, 0.3]") from None
    if count is not None and len(values) != count:
        raise BadShares(f"{count_of(len(values), 'share')} for {count_of(count, 'device')}: give one share per device")
    exact = [_exact(share) for share in values]
    whole = sum(exact)
    if whole == 0:
        raise BadShares(f"all of the shares {values} are zero: at least one has to be positive")
    parts = [share / whole for share in exact]
    if abs(whole - 1) > Fraction(len(exact), 100) and any(share.denominator > 1 for share in exact):
        raise BadShares(
            f"the shares {values} add up to {float(whole):.3g}: give parts of one, as "
            f"{[round(float(part), 2) for part in parts]}, or whole numbers, as [7, 3]"
        )
    return parts


def _exact(share: object) -> Fraction:
    """One share, a number of Python or NumPy, as a fraction of Python's integers."""
    if isinstance(share, bool) or not isinstance(share, numbers.Real):
        raise BadShares(f"a share is a number, {share!r} is of type {type(share).__name__}")
    try:
        if isinstance(share, numbers.Rational):
            exact = Fraction(int(share.numerator), int(share.denominator))
        else:
            exact = Fraction(float(share))
        if exact >= 0 and math.isfinite(float(exact)):
            return exact
    except (ValueError, OverflowError):  # NaN, infinity, or larger than any float
        pass
    raise BadShares(f"a share is zero or more and finite, {share!r} is not: for example [0.7, 0.3] or [7, 3]")


def sizes(total: int, count: int, shares: Sequence[float] | None = None, *, least: int = 1) -> list[int]:
    """Samples per device: together exactly ``total``, in the given shares or as evenly as possible.

    A device that would get fewer than ``least`` gets none; its samples go to the nearest device before it that has
    some, or else after it. Only if ``total`` itself is less than ``least``, one device gets fewer than ``least``.

    >>> sizes(10, 3)
    [4, 3, 3]
    >>> sizes(7, 3, [0.5, 0.3, 0.2])
    [4, 2, 1]
    >>> sizes(7, 3, [0.5, 0.3, 0.2], least=2)
    [4, 3, 0]
    """
    if shares is None:
        counts = [total // count + (device < total % count) for device in range(count)]
    else:
        due = [part * total for part in check(shares, count)]
        counts = [math.floor(part) for part in due]
        by_remainder = sorted(range(count), key=lambda i: (counts[i] - due[i], i))
        for i in by_remainder[: total - sum(counts)]:
            counts[i] += 1
    return counts if least <= 1 else _without_small(counts, least)


def _without_small(counts: list[int], least: int) -> list[int]:
    for i in reversed(range(len(counts))):
        if 0 < counts[i] < least:
            nearest = [j for j in [*range(i - 1, -1, -1), *range(i + 1, len(counts))] if counts[j]]
            if nearest:
                counts[nearest[0]] += counts[i]
                counts[i] = 0
    return counts
