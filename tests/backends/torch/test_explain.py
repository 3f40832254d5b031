"""What ``explain``, ``draw`` and ``timeline`` say of a call, and how much memory a plan may take."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_cases import scheduled, traced

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.backends.torch.run import threads
from manyhands.errors import EngineError
from manyhands.parallel import planner
from manyhands.parallel.costs import costs
from manyhands.parallel.explain import why_not_faster
from manyhands.parallel.function import Parallel
from manyhands.parallel.plan import Executor, Limit, Method, why_too_large
from manyhands.parallel.trials import Candidate, peak_on_threads
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import lanes_for, schedule
from manyhands.schedule.memory import one_after_the_other, peak
from manyhands.schedule.simulate import timeline_of

FOUR = Method(Executor.THREADS, "4 lanes")


@torch.library.custom_op("manyhands_tests::naps", mutates_args=())
def naps(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return x.clone()


naps.register_fake(torch.empty_like)


def napping(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x, y = naps(x), naps(y)
    return x + y


def branches(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [(x @ x).tanh() @ x for x in xs]


two_cores = pytest.mark.skipif(torch.get_num_threads() < 2, reason="one core: no lanes")

# Explaining


def test_explain_says_lanes_bounds_memory_reasons_and_advice() -> None:
    fast = mh.parallel(branches)
    fast(*(torch.randn(40, 40) for _ in range(4)))
    told = fast.explain()
    for words in (
        "branches: run as",
        "ms measured",
        "12 tasks",
        "(a lane is a CPU thread or a CUDA stream)",
        " between lanes",
        "cpu compute 0:",
        "work ",
        "critical path",
        "busiest lane",
        "why not faster:",
        "peak memory:",
        "times plain execution's",
        "advice: 4 independent, at 2 places: mm 40x40",
        "torch.bmm",
        "kinds of operations measured",
    ):
        assert words in told, told


@two_cores
def test_what_sleeps_at_once_runs_on_lanes_and_the_reason_is_named() -> None:
    for _ in range(5):  # other programs on the machine may let lanes lose the race
        fast = Parallel(napping)
        result = fast(torch.ones(2), torch.ones(2))
        assert result.tolist() == [2, 2]
        if (words := fast.explain()).startswith("napping: run as 2 lanes"):
            break
    assert words.startswith("napping: run as 2 lanes, equal to the bit"), words
    planned = fast.planned
    assert "predicted" in fast.explain()
    assert "critical path" in why_not_faster(planned, planned.schedule)


def test_nothing_can_be_told_before_a_call_or_of_what_cannot_be_traced(tmp_path: Path) -> None:
    fast = mh.parallel(lambda x: x if x.sum() > 0 else -x, pure=True)
    with pytest.raises(EngineError, match="call the function first"):
        fast.explain()
    fast(torch.ones(2))
    assert "cannot be traced" in fast.explain()
    with pytest.raises(EngineError, match="there is no schedule"):
        fast.timeline(tmp_path / "t.png")


# Timelines


@two_cores
def test_a_timeline_is_measured(tmp_path: Path) -> None:
    fast = Parallel(napping)
    fast(torch.ones(2), torch.ones(2))
    line = fast.measure()
    naps_seen = [span for span in line.spans if "naps" in span.name]
    assert len(line.spans) == 7
    assert len(naps_seen) == 6
    assert all(span.stop - span.start >= 0.01 for span in naps_seen)  # it really slept
    both = [(one, other) for one in naps_seen for other in naps_seen if one.lane < other.lane]
    # At the same time, if lanes won: on a busy machine they may not.
    assert not both or any(one.start < other.stop and other.start < one.stop for one, other in both)
    events = json.loads(fast.timeline(tmp_path / "t.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 7
    assert fast.timeline(tmp_path / "t.png").stat().st_size > 1000
    assert "<svg" in fast.timeline(tmp_path / "t.svg", simulated=True).read_text()


def test_a_measured_run_keeps_the_schedules_order_and_touches_nothing() -> None:
    total = torch.zeros(3)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return (x @ x).tanh() + torch.rand_like(y) @ y

    found = traced(function, torch.ones(3, 3), torch.ones(3, 3))
    made = scheduled(found, 2, costs(found, None).tasks)
    state = torch.get_rng_state()
    moments = planning.task_moments(found, made, None, 2)
    assert total.tolist() == [0, 0, 0]
    assert torch.equal(torch.get_rng_state(), state)
    for task, needs in enumerate(made.graph.needs):
        assert all(moments[need][1] <= moments[task][0] for need in needs)
    line = timeline_of(made, moments, "measured")
    for lane in line.lanes():
        own = [(span.start, span.stop) for span in line.spans if span.lane == lane]
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(own))


# Forecasts


def test_a_call_can_be_forecast() -> None:
    def chains(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            for _ in range(5):
                x = x @ x
            results.append(x)
        return results

    fast = mh.parallel(chains, synchronous=True)
    fast(*(torch.randn(64, 64) / 8 for _ in range(16)))
    one, two, many = (fast.forecast(count, lanes=1, bandwidth=1e12, latency=1e-7) for count in (1, 2, 16))
    assert one.speed_up == pytest.approx(1)
    assert 1.5 < two.speed_up <= 2.01
    assert two.speed_up < many.speed_up <= 16.1
    assert "16 devices of 1 lane, 1000 GB/s between them" in str(many)


# Memory


def chains(*xs: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for x in xs:
        for _ in range(5):
            x = x.repeat(4).sin()
            x = x[: x.numel() // 4] + 1
        results.append(x)
    return results


def peaks(function: Callable[..., Any], lanes: int, *arguments: Any) -> int:
    found = traced(function, *arguments)
    measured = graph(threads.tasks(found))
    footprint = planning.footprint(found)
    if lanes == 1:
        return peak(measured.tasks, footprint, one_after_the_other(range(len(measured))))
    return peak_on_threads(schedule(measured, lanes_for(measured, lanes)), footprint)


def test_the_peak_is_what_is_alive_at_once() -> None:
    x = torch.ones(1000)
    assert peaks(lambda x: x + 1, 1, x) == 2 * 4000
    assert peaks(lambda x: (x + 1) * 2, 1, x) == 3 * 4000  # x, the sum while it is read, the result
    assert peaks(lambda x: ((x + 1) * 2) - 3, 1, x) == 3 * 4000  # the sum is gone by then
    assert peaks(lambda x: (x + 1).mul_(2).view(10, 100), 1, x) == 2 * 4000  # in place, and a view of it
    assert peaks(lambda x: [x + 1, x + 2], 1, x) == 3 * 4000  # results stay
    weight = torch.ones(500)
    assert peaks(lambda x: x[:500] * weight, 1, x) == 4000 + 2000 + 2000  # what comes from outside is there


def test_lanes_take_more_memory_and_too_much_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [torch.ones(1000) for _ in range(4)]
    assert peaks(chains, 4, *xs) > 1.3 * peaks(chains, 1, *xs)
    monkeypatch.setattr(
        planner.candidates, "candidates", lambda trials: [Candidate(FOUR, four(trials.measured), trials.trace, 4)]
    )
    monkeypatch.setattr(planning, "device_memory", lambda device: 0)
    fast = Parallel(chains)
    fast(*xs)
    assert "4 lanes is not tried: it would take" in fast.explain()
    assert not measured_lanes(fast)
    allowed = Parallel(chains, memory=10.0)
    allowed(*xs)
    assert measured_lanes(allowed)


def measured_lanes(function: Any) -> list[str]:
    """The line of four lanes among measured times, whether or not they won."""
    return [line for line in function.explain().splitlines() if line.split()[:2] == ["4", "lanes"] and "ms" in line]


def four(measured: Any) -> Any:
    return schedule(measured, lanes_for(measured, 4))


def test_a_hundredth_of_the_device_does_not_matter() -> None:
    assert why_too_large(FOUR, 140, 100, Limit(1.3, 0)) is not None
    assert why_too_large(FOUR, 130, 100, Limit(1.3, 0)) is None
    assert why_too_large(FOUR, 140, 100, Limit(1.3, 40)) is None
    assert "memory=1.5" in str(why_too_large(FOUR, 140, 100, Limit(1.3, 39)))
    with pytest.raises(EngineError, match="less than plain execution"):
        mh.parallel(chains, memory=0.5)
