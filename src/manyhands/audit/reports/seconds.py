"""Times and counts as people read them."""

from __future__ import annotations


def counted(number: int, name: str) -> str:
    """A number of things.

    >>> counted(1, "wait"), counted(3, "wait")
    ('1 wait', '3 waits')
    """
    return f"{number} {name}{'s' * (number != 1)}"


def seconds(value: float) -> str:
    """A time with its unit.

    >>> seconds(0.0123), seconds(2e-6), seconds(3)
    ('12.3 ms', '2 us', '3 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    return "0 us"
