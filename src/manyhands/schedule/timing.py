"""Times two ways in turns, so that a moment in which the machine is busy meets both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Way = TypeVar("_Way")
_TURNS = 3


def in_turns(one: _Way, other: _Way, seconds_of: Callable[[_Way], float]) -> tuple[float, float]:
    """The seconds of each in its best turn: what disturbs only ever adds to them."""
    turns = [(seconds_of(one), seconds_of(other)) for _ in range(_TURNS)]
    return min(times[0] for times in turns), min(times[1] for times in turns)
