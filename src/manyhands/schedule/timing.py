"""Times alternatives in turns, so that a moment in which the machine is busy affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_A = TypeVar("_A")
_TURNS = 3


def rounds(alternatives: Sequence[_A], seconds_of: Callable[[_A], float]) -> Iterator[list[float]]:
    """Rounds without end: the seconds of each alternative. Each round begins with the next alternative."""
    first = 0
    while True:
        order = [*range(first, len(alternatives)), *range(first)]
        spent = {position: seconds_of(alternatives[position]) for position in order}
        yield [spent[position] for position in range(len(alternatives))]
        first = (first + 1) % len(alternatives)


def in_turns(first: _A, second: _A, seconds_of: Callable[[_A], float]) -> tuple[float, float]:
    """The seconds of each in its best turn: disturbances only ever add to them."""
    turns = [times for _, times in zip(range(_TURNS), rounds((first, second), seconds_of), strict=False)]
    return min(times[0] for times in turns), min(times[1] for times in turns)
