"""Schedules one after the other: a break needs all before it, and all after it needs the break."""

from __future__ import annotations

from manyhands.schedule.check import check
from manyhands.schedule.forecast import Machine, forecast
from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import lanes_for, schedule
from manyhands.schedule.memory import Footprint
from manyhands.schedule.sequence import Part, one_after_another
from manyhands.schedule.simulate import moments


def part(name: str, count: int) -> Part:
    """Independent tasks on two lanes: each reads memory 0 and writes one of its own."""
    tasks = [Task(f"{name}{n}", frozenset({0}), frozenset({n + 1}), seconds=1.0) for n in range(count)]
    made = graph(tasks)
    sizes = dict.fromkeys(range(count + 1), 8)
    return name, schedule(made, lanes_for(made, 2)), Footprint(sizes, frozenset({0}), frozenset({1}))


def test_a_break_stands_between_two_parts() -> None:
    made, footprint = one_after_another([part("a", 3), part("b", 4), part("c", 1)])
    check(made)
    names = [task.name for task in made.graph.tasks]
    assert names == ["a0", "a1", "a2", "Python, then b", "b0", "b1", "b2", "b3", "Python, then c", "c0"]
    assert made.graph.needs[3] == {0, 1, 2}
    assert all(3 in made.graph.needs[task] for task in range(4, 8))
    assert made.graph.needs[9] == {8}
    when = moments(made)
    assert max(stop for _, stop in when[:3]) <= min(start for start, _ in when[4:8])
    assert len(footprint.sizes) == 4 + 5 + 2
    assert len(footprint.inputs) == len(footprint.results) == 3
    assert len(set(made.lanes)) == len(made.lanes) == 3  # two that compute, one for the host


def test_it_can_be_forecast() -> None:
    made, footprint = one_after_another([part("a", 4), part("b", 4)])
    alone, two = (forecast(made.graph, footprint, Machine(count, latency=0.0)).seconds for count in (1, 2))
    assert two < alone
