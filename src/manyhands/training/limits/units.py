"""Amounts that a user writes in words: durations (``"1h30m"``) and intervals (``"500 steps"``)."""

from __future__ import annotations

import datetime
import math
import re
from numbers import Real
from typing import Any

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")  # as SLURM writes it: 1-12:00:00
_EVERY = re.compile(r"(\d+)\s*(step|epoch)s?")


def seconds(duration: Any) -> float | None:
    """The seconds of a duration; None where it is none.

    >>> seconds("2h"), seconds("1h30m"), seconds("1-12:00:00"), seconds(90), seconds("soon")
    (7200.0, 5400.0, 129600.0, 90.0, None)
    """
    if isinstance(duration, datetime.timedelta):
        duration = duration.total_seconds()
    if isinstance(duration, Real) and not isinstance(duration, bool):
        return float(duration) if 0 < float(duration) < math.inf else None
    if not isinstance(duration, str):
        return None
    if (clock := _CLOCK.fullmatch(duration.strip())) is not None:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + rest) or None
    parts = _PART.findall(duration)
    if not parts or _PART.sub("", duration).strip():
        return None
    return float(sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts)) or None


_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)


def memory(amount: Any) -> int | None:
    """The bytes of an amount of memory; None where it is none.

    >>> memory("2GB"), memory("512 MiB"), memory(1000), memory("much")
    (2147483648, 536870912, 1000, None)
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        return amount if amount > 0 else None
    matched = _MEMORY.fullmatch(amount.strip()) if isinstance(amount, str) else None
    return int(float(matched[1]) * _BYTES[matched[2].lower()]) or None if matched is not None else None


def every(interval: Any) -> tuple[int, str] | None:
    """The number and the unit of an interval; None where it is none.

    >>> every("500 steps"), every("1 epoch"), every("0 steps"), every(500)
    ((500, 'steps'), (1, 'epochs'), None, None)
    """
    matched = _EVERY.fullmatch(interval.strip().lower()) if isinstance(interval, str) else None
    return (int(matched[1]), f"{matched[2]}s") if matched is not None and int(matched[1]) else None
