"""Counts, times and amounts of memory as people read and write them."""

from __future__ import annotations

import datetime
import math
import re
from numbers import Real
from typing import Any


def count_of(number: float, name: str, plural: str = "") -> str:
    """A number of things: each text with a count in it is right for one, too.

    >>> count_of(1, "wait"), count_of(3, "wait"), count_of(0, "copy", "copies"), count_of(60000, "sample")
    ('1 wait', '3 waits', '0 copies', '60,000 samples')
    >>> count_of(1.0, "second"), count_of(0.5, "second")
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
    return count_of(round(count), "byte")


# As a user writes them: "1h30m", "8GB", "500 steps"

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")  # as SLURM writes it: 1-12:00:00
_EVERY = re.compile(r"(\d+)\s*(step|epoch)s?")


def parse_seconds(duration: Any) -> float | None:
    """The seconds of a duration; None where it is none.

    >>> parse_seconds("2h"), parse_seconds("1h30m"), parse_seconds(90), parse_seconds("90"), parse_seconds("soon")
    (7200.0, 5400.0, 90.0, 90.0, None)
    """
    if isinstance(duration, datetime.timedelta):
        duration = duration.total_seconds()
    if isinstance(duration, Real) and not isinstance(duration, bool):
        return float(duration) if 0 < float(duration) < math.inf else None
    if not isinstance(duration, str):
        return None
    duration = f"{duration}s" if duration.strip().isdecimal() else duration  # the command has nothing but text
    if (clock := _CLOCK.fullmatch(duration.strip())) is not None:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + rest) or None
    parts = _PART.findall(duration)
    if not parts or _PART.sub("", duration).strip():
        return None
    return float(sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts)) or None


def parse_interval(interval: Any) -> tuple[int, str] | None:
    """The number and the unit of an interval; None where it is none.

    >>> parse_interval("500 steps"), parse_interval("1 epoch"), parse_interval("0 steps"), parse_interval(500)
    ((500, 'steps'), (1, 'epochs'), None, None)
    """
    matched = _EVERY.fullmatch(interval.strip().lower()) if isinstance(interval, str) else None
    return (int(matched[1]), f"{matched[2]}s") if matched is not None and int(matched[1]) else None
