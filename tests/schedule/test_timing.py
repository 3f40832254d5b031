"""Plans that are nearly alike are timed in turns: what disturbs the host must not choose among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.parallel.choose.gpu import is_ahead
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import Executor, Way
from manyhands.schedule.timing import in_turns


def kept(*_: Any) -> None:
    """The best so far."""


def tried(*_: Any) -> None:
    """A candidate."""


class Clock:
    """What a stopwatch shows, time after time, of each of the two; it counts how often it is asked."""

    def __init__(self, **times: list[float]) -> None:
        self._times: dict[str, Iterator[float]] = {name: iter(own) for name, own in times.items()}
        self.asked = 0

    def __call__(self, run: Any, *_: int) -> float:
        self.asked += 1
        return next(self._times[run.__name__])


TWO, FOUR = Way(Executor.GRAPH, "2 lanes"), Way(Executor.GRAPH, "4 lanes")


def best_so_far(seconds: float) -> Planned:
    return Planned(kept, way=TWO, seconds={TWO: seconds})


def test_a_disturbed_first_time_does_not_decide() -> None:
    clock = Clock(tried=[4.40e-3, 4.2e-3, 4.11e-3, 4.3e-3], kept=[4.6e-3, 4.38e-3, 4.41e-3])
    best = best_so_far(4.38e-3)
    assert is_ahead(FOUR, tried, best, clock)
    assert best.seconds == {TWO: 4.38e-3, FOUR: 4.11e-3}


def test_a_lucky_first_time_does_not_decide() -> None:
    clock = Clock(tried=[4.2e-3, 4.5e-3, 4.5e-3, 4.5e-3], kept=[4.3e-3, 4.4e-3, 4.4e-3])
    assert not is_ahead(FOUR, tried, best_so_far(4.3e-3), clock)


@pytest.mark.parametrize(
    ("first", "least", "ahead"),
    [(6e-3, 4e-3, False), (3e-3, 4e-3, True), (1.00, 1.01, True)],
    ids=["clearly slower", "clearly faster", "long: the host does not disturb"],
)
def test_what_is_clear_is_timed_once(first: float, least: float, ahead: bool) -> None:
    clock = Clock(tried=[first])
    assert is_ahead(FOUR, tried, best_so_far(least), clock) is ahead
    assert clock.asked == 1


def test_turns_alternate() -> None:
    order: list[str] = []

    def seconds_of(one: str) -> float:
        order.append(one)
        return float(len(order))

    assert in_turns("a", "b", seconds_of) == (1.0, 2.0)
    assert order == ["a", "b", "b", "a", "a", "b"]  # each turn begins with another
