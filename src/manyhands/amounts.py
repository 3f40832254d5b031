"""Counts and times as people read them."""

from __future__ import annotations


def counted(number: float, name: str, plural: str = "") -> str:
    """A number of things: each text with a count in it is right for one, too.

    >>> counted(1, "wait"), counted(3, "wait"), counted(0, "copy", "copies"), counted(60000, "sample")
    ('1 wait', '3 waits', '0 copies', '60,000 samples')
    >>> counted(1.0, "second"), counted(0.5, "second")
    ('1 second', '0.5 seconds')
    """
    shown = f"{number:g}" if isinstance(number, float) else f"{number:,}"
    return f"{shown} {name if number == 1 else plural or name + 's'}"


def seconds(value: float) -> str:
    """A time with its unit.

    >>> seconds(0.0123), seconds(2e-6), seconds(3)
    ('12.3 ms', '2 us', '3 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    return "0 us"


def bytes_in_words(count: float) -> str:
    """An amount of memory with its unit.

    >>> bytes_in_words(12), bytes_in_words(2048), bytes_in_words(3.5e6)
    ('12 bytes', '2.05 kB', '3.5 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return counted(round(count), "byte")
