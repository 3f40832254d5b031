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


@pytest.mark.parametrize(
    ("lanes", "plain", "turns"),
    [(0.5, 0.2, 1), (0.05, 0.02, 2), (0.31, 0.3, 1), (0.29, 0.3, 2), (1e-6, 1e-6, 31)],
    ids=["far behind", "short and far behind", "long without a gain", "long with a gain", "very short"],
)
def test_how_often_both_run(clock: Clock, lanes: float, plain: float, turns: int) -> None:
    ours, theirs = in_turns(clock.worker("lanes", lanes), clock.worker("plain", plain))
    assert clock.calls["plain"] == clock.calls["lanes"] == turns
    if turns < 31:  # of very short calls each turn has several
        assert (set(ours), set(theirs)) == ({lanes}, {plain})


def test_one_disturbed_turn_decides_nothing(clock: Clock) -> None:
    disturbed, fast = clock.worker("lanes", 0.05), clock.worker("lanes", 0.01)
    ours, theirs = in_turns(lambda: fast() if clock.calls["lanes"] else disturbed(), clock.worker("plain", 0.02))
    assert len(ours) == len(theirs) >= 3
    assert {*ours} == {0.01}


def test_short_calls_run_in_several_turns(clock: Clock) -> None:
    ours, theirs = in_turns(clock.worker("lanes", 0.012), clock.worker("plain", 0.01))
    assert len(ours) == len(theirs) >= 3
    assert clock.order.startswith("pllppl"), "each turn begins with another"
