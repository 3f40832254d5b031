"""Graphs, schedules, their proof and their simulation, without a framework."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import schedule_cases
from hypothesis import given, settings

from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph, Task, graph
from manyhands.schedule.lanes import Lane, schedule, schedule_chains, schedule_main_lane
from manyhands.schedule.simulate import bounds, simulate

MEMORIES = st.frozensets(st.integers(0, 5), max_size=3)
TASKS = st.builds(
    Task,
    name=st.sampled_from(["mm", "relu", "copy"]),
    reads=MEMORIES,
    writes=MEMORIES,
    device=st.sampled_from(["gpu:0", "gpu:1"]),
    seconds=st.floats(1e-6, 1e-3),
    share=st.floats(0.05, 1.0),
    token=st.none() | st.sampled_from(["random gpu:0", "host"]),
)
PROGRAMS = st.lists(TASKS, max_size=25)


def lanes(count: int) -> list[Lane]:
    return [Lane(device, "compute", number) for device in ("gpu:0", "gpu:1") for number in range(count)]


def test_the_example_of_the_graph() -> None:
    x, y, z = 0, 1, 2
    program = [
        Task("a", writes=frozenset({x})),
        Task("b", writes=frozenset({y})),
        Task("c", reads=frozenset({x}), writes=frozenset({z})),
        Task("d", reads=frozenset({y, z})),
        Task("e", writes=frozenset({x})),
    ]
    needs = graph(program).needs
    assert needs[2] == {0}
    assert needs[3] == {1, 2}
    assert needs[4] == {0, 2}


def _conflict(first: Task, second: Task) -> bool:
    touched = first.writes & (second.reads | second.writes) or second.writes & first.reads
    return bool(touched) or (first.token is not None and first.token == second.token)


@given(PROGRAMS, st.integers(1, 4))
def test_every_conflicting_pair_is_ordered(program: list[Task], count: int) -> None:
    planned = schedule(graph(program), lanes(count))
    check(planned)
    before = schedule_cases.known_before(planned)
    for first, second in itertools.combinations(range(len(program)), 2):
        if _conflict(program[first], program[second]):
            assert first in before[second]


@given(PROGRAMS, st.integers(1, 4), st.data(), st.sampled_from([schedule, schedule_main_lane, schedule_chains]))
@settings(max_examples=300)
def test_no_wait_can_be_taken_away(program: list[Task], count: int, data: st.DataObject, way: Any) -> None:
    planned = way(graph(program), lanes(count))
    check(planned)
    schedule_cases.no_wait_can_be_taken_away(planned, data)


@given(PROGRAMS.filter(lambda program: len(program) > 1), st.data())
def test_a_task_on_another_lane_is_noticed(program: list[Task], data: st.DataObject) -> None:
    """Moving a task that waits for its lane to a lane of its own, without waits, is objected to."""
    planned = schedule(graph(program), [*lanes(1), Lane("gpu:0", "compute", 9)])
    needy = [task for task in range(len(program)) if planned.graph.needs[task]]
    if not needy:
        return
    task = data.draw(st.sampled_from(needy))
    moved = [2 if index == task else lane for index, lane in enumerate(planned.lane_of)]
    if planned.lane_of.count(2):
        return
    broken = dataclasses.replace(
        planned, lane_of=tuple(moved), waits={k: v for k, v in planned.waits.items() if k != task}
    )
    with pytest.raises(UnsafeSchedule):
        check(broken)


def test_a_wait_for_the_future_is_a_deadlock() -> None:
    program = [Task("a", device="gpu:0"), Task("b", device="gpu:0")]
    planned = schedule(graph(program), lanes(2))
    with pytest.raises(UnsafeSchedule, match="for ever"):
        check(dataclasses.replace(planned, waits={planned.order[0]: (planned.order[1],)}))
    with pytest.raises(UnsafeSchedule, match="exactly once"):
        check(dataclasses.replace(planned, order=(0, 0)))


@given(PROGRAMS, st.integers(1, 4))
@settings(max_examples=50)
def test_simulated_times_keep_order_and_bounds(program: list[Task], count: int) -> None:
    planned = schedule(graph(program), lanes(count))
    line = simulate(planned)
    assert len(line.spans) == len(program)
    assert line.seconds >= bounds(planned).seconds * 0.999 - 1e-9
    assert line.seconds <= planned.graph.work() * 1.001 + 1e-9 or any(task.share < 1 for task in program)
    for lane in line.lanes():
        own = sorted((span.start, span.stop) for span in line.spans if span.lane == lane)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(own))


def chains(number: int, length: int, share: float) -> Graph:
    """Independent chains: each task reads what the one before it wrote."""
    return graph(
        Task("mm", frozenset({chain}), frozenset({chain}), "gpu:0", seconds=1e-5, share=share)
        for _ in range(length)
        for chain in range(number)
    )


@given(PROGRAMS, st.integers(1, 4))
def test_an_unbranched_chain_stays_together(program: list[Task], count: int) -> None:
    planned = schedule_chains(graph(program), lanes(count))
    check(planned)
    place = {task: number for lane in planned.per_lane() for number, task in enumerate(lane)}
    for task, needs in enumerate(planned.graph.needs):
        for need in needs if len(needs) == 1 else ():
            if len(planned.graph.followers[need]) == 1 and program[need].device == program[task].device:
                assert planned.lane_of[task] == planned.lane_of[need]
                assert place[task] == place[need] + 1


def test_long_chains_are_done_one_after_the_other() -> None:
    planned = schedule_chains(chains(8, 50, 0.5), [Lane("gpu:0", "compute", n) for n in range(2)])
    check(planned)
    assert planned.wait_count() == 0
    assert [len({task % 8 for task in lane}) for lane in planned.per_lane()] == [4, 4]
    assert simulate(planned).seconds == pytest.approx(200e-5)


def test_copies_go_in_the_order_in_which_their_sources_are_made() -> None:
    """The longest product comes first; its copy must not wait for that of the first one in the program."""
    program = []
    for number in range(10):
        product = 1e-3 * (1 + number / 10)
        program.append(Task("mm", writes=frozenset({number}), device="gpu:0", seconds=product))
        program.append(Task("out", frozenset({number}), device="gpu:0", kind="copy out", seconds=1e-3))
    planned = schedule(graph(program), [Lane("gpu:0"), Lane("gpu:0", "copy out")])
    assert [task + 1 for task in planned.per_lane()[0]] == planned.per_lane()[1]
    assert simulate(planned).seconds == pytest.approx(sum(task.seconds for task in program[::2]) + 1e-3)


def test_the_longest_chain_waits_for_nobody() -> None:
    """A backward pass: from each layer to the one before it, and beside that the gradient of its weights."""
    program = []
    for layer in range(6):
        program.append(Task("input", frozenset({layer}), frozenset({layer + 1}), "gpu:0", seconds=2e-3))
        long = 5e-3 if layer < 3 else 1e-3
        program.append(Task("weight", frozenset({layer}), frozenset({100 + layer}), "gpu:0", seconds=long))
        program.append(Task("cast", frozenset({100 + layer}), frozenset({200 + layer}), "gpu:0", seconds=1e-4))
    planned = schedule_main_lane(graph(program), lanes(3))
    check(planned)
    assert {planned.lane_of[task] for task in range(0, 18, 3)} == {0}
    assert {planned.lane_of[task] for task in range(18) if task % 3} == {1, 2}
    assert all(planned.lane_of[task + 1] == planned.lane_of[task] for task in range(1, 18, 3)), (
        "a cast follows its gradient"
    )
    assert not any(planned.waits.get(task) for task in range(0, 18, 3))


def test_independent_chains_get_a_lane_each() -> None:
    planned = schedule(chains(8, 50, 0.1), [Lane("gpu:0", "compute", n) for n in range(8)])
    check(planned)
    assert planned.wait_count() == 0
    assert simulate(planned).seconds == pytest.approx(50e-5)
    crowded = schedule(chains(8, 50, 1.0), [Lane("gpu:0", "compute", n) for n in range(8)])
    assert simulate(crowded).seconds == pytest.approx(400e-5)  # lanes are no second chip


def test_lanes_stand_in_the_order_of_their_numbers() -> None:
    line = simulate(schedule(chains(12, 1, 0.1), [Lane("gpu:0", "compute", n) for n in range(12)]))
    assert line.lanes() == [f"gpu:0 compute {n}" for n in range(12)]
