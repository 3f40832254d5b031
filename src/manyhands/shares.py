"""How many samples each device gets.

Shares are turned into whole samples by the method of the largest remainder: everyone gets the
rounded-down part of what is due, and the samples left over go, one each, to those whose due part
was cut most (the earlier device first where that is equal). Ten samples in shares 0.5, 0.3, 0.2
are 5, 3, 2; seven are due 3.5, 2.1, 1.4, so 3, 2, 1 and the one left over goes to the first: 4, 2, 1.
Even shares are the case where all are equal: ten samples on three devices are 4, 3, 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from manyhands.errors import BadShares


def check(shares: Sequence[float], count: int) -> list[Fraction]:
    """The shares as exact fractions of one, or the reason why they are no shares."""
    if len(shares) != count:
        raise BadShares(f"{len(shares)} shares for {count} devices: give one share per device")
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, (int, float, Fraction)):
            raise BadShares(f"a share is a number, {share!r} is a {type(share).__name__}")
        if not math.isfinite(share) or share < 0:
            raise BadShares(f"a share is zero or more and finite, {share!r} is not: for example [0.7, 0.3] or [7, 3]")
    exact = [Fraction(share) for share in shares]
    whole = sum(exact)
    if whole == 0:
        raise BadShares(f"all of the shares {list(shares)} are zero: somebody has to do the work")
    return [share / whole for share in exact]


def sizes(total: int, count: int, shares: Sequence[float] | None = None) -> list[int]:
    """Samples per device: together exactly ``total``, in the given shares or as even as can be.

    >>> sizes(10, 3)
    [4, 3, 3]
    >>> sizes(7, 3, [0.5, 0.3, 0.2])
    [4, 2, 1]
    """
    parts = [Fraction(1, count)] * count if shares is None else check(shares, count)
    due = [part * total for part in parts]
    given = [math.floor(part) for part in due]
    left = total - sum(given)
    by_remainder = sorted(range(count), key=lambda i: (given[i] - due[i], i))
    for i in by_remainder[:left]:
        given[i] += 1
    return given
