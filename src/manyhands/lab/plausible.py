"""Which times can be true. Others come from a busy machine: they are measured again once, and then refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Measured = TypeVar("_Measured")
_BUSY = 30.0  # percent of the CPU that other programs use


class Implausible(Exception):
    """Times that cannot be true."""


def check_load() -> None:
    """Raise if other programs use the CPU; call it while this process computes nothing."""
    import psutil

    load = psutil.cpu_percent(interval=0.5)
    if load > _BUSY:
        raise Implausible(f"other programs use {load:.0f}% of the CPU")


def check_gain(gain: float, most: float, name: str, to: str) -> None:
    """Raise if a gain, as it is printed, is more than what the devices can give."""
    if round(gain, 2) > most:
        raise Implausible(f"{name} was {gain:.2f} times as fast as {to}, and {most:g} times is the most possible")


def measured_twice(measure: Callable[[], _Measured]) -> _Measured:
    """What ``measure`` returns, between two looks at the load; a second time if the first one is implausible."""
    try:
        return _measured(measure)
    except Implausible:
        return _measured(measure)


def _measured(measure: Callable[[], _Measured]) -> _Measured:
    check_load()
    result = measure()
    check_load()
    return result
