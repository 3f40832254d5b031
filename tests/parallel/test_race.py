"""How often candidates are called before one is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from manyhands.parallel.choose import cpu


class Clock:
    """Time passes only where somebody works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: Counter[str] = Counter()

    def worker(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds
            self.calls[name] += 1

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: clock.now)
    return clock


def test_plain_execution_is_not_repeated_when_all_others_are_far_behind(clock: Clock) -> None:
    times = cpu.race([clock.worker("plain", 0.2), clock.worker("lanes", 0.5)], lambda: None)
    assert clock.calls == {"plain": 1, "lanes": 1}
    assert times == [[pytest.approx(0.2)], [pytest.approx(0.5)]]


def test_who_is_near_runs_again(clock: Clock) -> None:
    times = cpu.race([clock.worker("plain", 0.3), clock.worker("lanes", 0.31)], lambda: None)
    assert clock.calls["plain"] == clock.calls["lanes"] == len(times[0]) == len(times[1]) == 2


def test_short_calls_run_in_several_rounds(clock: Clock) -> None:
    times = cpu.race([clock.worker("plain", 0.01), clock.worker("lanes", 0.02)], lambda: None)
    assert len(times[0]) == len(times[1]) >= 7
