"""How often a candidate and the best one so far are called before one of them is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from manyhands.parallel import trials
from manyhands.parallel.trials import in_turns


class Clock:
    """Time passes only where somebody works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: Counter[str] = Counter()
        self.order = ""

    def worker(self, name: str, seconds: float) -> Callable[[], float]:
        def work() -> float:
            self.now += seconds
            self.calls[name] += 1
            self.order += name[0]
            return seconds

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trials.time, "perf_counter", lambda: clock.now)
    return clock


def test_who_is_far_behind_runs_once(clock: Clock) -> None:
    assert in_turns(clock.worker("lanes", 0.5), clock.worker("plain", 0.2)) == ([0.5], [0.2])
    assert clock.calls == {"plain": 1, "lanes": 1}


def test_short_calls_far_behind_run_twice(clock: Clock) -> None:
    assert in_turns(clock.worker("lanes", 0.05), clock.worker("plain", 0.02)) == ([0.05], [0.02])
    assert clock.calls == {"plain": 2, "lanes": 2}


def test_one_disturbed_turn_decides_nothing(clock: Clock) -> None:
    disturbed, fast = clock.worker("lanes", 0.05), clock.worker("lanes", 0.01)
    ours, theirs = in_turns(lambda: fast() if clock.calls["lanes"] else disturbed(), clock.worker("plain", 0.02))
    assert len(ours) == len(theirs) >= 3
    assert {*ours} == {0.01}


def test_long_calls_that_gain_nothing_run_once(clock: Clock) -> None:
    assert in_turns(clock.worker("lanes", 0.31), clock.worker("plain", 0.3)) == ([0.31], [0.3])


def test_long_calls_that_gain_run_again(clock: Clock) -> None:
    ours, theirs = in_turns(clock.worker("lanes", 0.29), clock.worker("plain", 0.3))
    assert clock.calls["plain"] == clock.calls["lanes"] == len(ours) == len(theirs) == 2


def test_short_calls_run_in_several_turns(clock: Clock) -> None:
    ours, theirs = in_turns(clock.worker("lanes", 0.012), clock.worker("plain", 0.01))
    assert len(ours) == len(theirs) >= 3
    assert clock.order.startswith("pllppl"), "each turn begins with another"


def test_very_short_calls_end_too(clock: Clock) -> None:
    in_turns(clock.worker("lanes", 1e-6), clock.worker("plain", 1e-6))
    assert clock.calls["lanes"] == clock.calls["plain"] == 31
