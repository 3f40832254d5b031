"""Programs placed on many devices: proved, simulated, and really run, in any order that the schedule allows."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from fake_backend import FakeBackend, FakeDevice, FakeTensor
from hypothesis import given, settings
from schedule_cases import no_wait_can_be_taken_away
from support import at_once

from manyhands.errors import EngineError
from manyhands.schedule.forecast import Machine, ScheduleForecast, forecast
from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint

MEMORIES = st.frozensets(st.integers(0, 6), max_size=3)
PROGRAMS = st.lists(
    st.builds(
        Task, st.just("t"), MEMORIES, MEMORIES, seconds=st.floats(1e-6, 1e-3), token=st.none() | st.just("random")
    ),
    max_size=25,
)
FOOTPRINT = Footprint({memory: 1000 * (memory + 1) for memory in range(6)}, frozenset({0, 1, 2}), frozenset({3, 4}))


class Machinery:
    """The fake backend's devices, each with memories of its own, and tasks that mix the numbers they read."""

    def __init__(self, program: list[Task], devices: int, footprint: Footprint) -> None:
        self.program, self.footprint = program, footprint
        self.backend = FakeBackend(gpus=devices)
        self.cells: dict[tuple[int, int], FakeTensor] = {}
        self.handles: dict[int, float] = {}
        written = frozenset().union(*(task.writes for task in program))
        for memory in footprint.inputs:
            for device in range(devices) if memory not in written else (0,):
                self._set(memory, device, float(memory + 1))

    def _set(self, memory: int, device: int, value: float) -> None:
        if memory in self.footprint.sizes:
            self.cells[memory, device] = FakeTensor([value], FakeDevice("gpu", device))
        else:
            self.handles[memory] = value

    def _get(self, memory: int, device: int) -> float:
        if memory not in self.footprint.sizes:
            return self.handles.get(memory, 0.0)
        result = self.cells.get((memory, device))
        return 0.0 if result is None else float(result.data[0])

    def do(self, number: int, device: int) -> None:
        task = self.program[number]
        total = sum((m + 1) * self._get(m, device) for m in sorted(task.reads)) + number
        for memory in task.writes:
            self._set(memory, device, (self._get(memory, device) * 3 + total) % 1009)

    def copy(self, memory: int, source: int, target: int) -> None:
        held = self.cells.get((memory, source), FakeTensor([0.0], FakeDevice("gpu", source)))
        self.cells[memory, target] = self.backend.copy(held, FakeDevice("gpu", target))

    def results(self) -> dict[int, float]:
        return {memory: self._get(memory, 0) for memory in self.footprint.results | self.footprint.inputs}


def in_order(program: list[Task], footprint: Footprint = FOOTPRINT) -> dict[int, float]:
    one = Machinery(program, 1, footprint)
    for number in range(len(program)):
        one.do(number, 0)
    return one.results()


def doing(found: ScheduleForecast, machinery: Machinery) -> Callable[[int], None]:
    def do(place: int) -> None:
        if place in found.placed.copies:
            machinery.copy(*found.placed.copies[place])
        else:
            number = found.placed.origin[place]
            machinery.do(number, found.placed.device_of[number])

    return do


def shuffled(made: Schedule, do: Callable[[int], None], chance: random.Random) -> None:
    """Any order that lanes and waits allow."""
    queues = [lane[::-1] for lane in made.per_lane()]
    over: set[int] = set()
    while any(queues):
        can = [q for q in queues if q and all(other in over for other in made.waits.get(q[-1], ()))]
        task = chance.choice(can).pop()
        do(task)
        over.add(task)


def on_threads(made: Schedule, do: Callable[[int], None]) -> None:
    """A thread for every lane."""
    done = [threading.Event() for _ in made.graph.tasks]

    def lane(tasks: list[int]) -> None:
        for task in tasks:
            for other in made.waits.get(task, ()):
                assert done[other].wait(10)
            do(task)
            done[task].set()

    lanes = [tasks for tasks in made.per_lane() if tasks]
    at_once(lambda number: lane(lanes[number]), len(lanes))


@given(PROGRAMS, st.sampled_from([1, 2, 3, 16]), st.integers(1, 2), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_program_on_any_number_of_devices_gives_the_same(
    program: list[Task], devices: int, lanes: int, chance: Any
) -> None:
    result = forecast(graph(program), FOOTPRINT, Machine(devices, lanes, bandwidth=1e8, latency=1e-6))
    machinery = Machinery(program, devices, FOOTPRINT)
    shuffled(result.schedule, doing(result, machinery), chance)
    assert machinery.results() == in_order(program)
    assert result.seconds >= 0


@given(PROGRAMS, st.sampled_from([2, 16]), st.data())
@settings(max_examples=60, deadline=None)
def test_no_wait_between_devices_can_be_taken_away(program: list[Task], devices: int, data: st.DataObject) -> None:
    made = forecast(graph(program), FOOTPRINT, Machine(devices)).schedule
    no_wait_can_be_taken_away(made, data)


def ensemble(members: int, length: int) -> tuple[list[Task], Footprint]:
    """Chains that do not need each other, each with a weight, and their sum."""
    tasks = []
    for step in range(length):
        for member in range(members):
            reads = frozenset({member, 100 + member} if step else {100 + member})
            tasks.append(Task("mm", reads, frozenset({member}), seconds=1e-3))
    tasks.append(Task("sum", frozenset(range(members)), frozenset({99}), seconds=1e-4))
    sizes = dict.fromkeys([*range(members), *range(100, 100 + members), 99], 10000)
    return tasks, Footprint(sizes, frozenset(range(100, 100 + members)), frozenset({99}))


@pytest.mark.parametrize("devices", [2, 16])
def test_an_ensemble_on_devices_runs_on_a_thread_each_and_its_speed_up_is_stated(devices: int) -> None:
    tasks, footprint = ensemble(16, 10)
    found = forecast(graph(tasks), footprint, Machine(devices))
    assert set(found.placed.device_of.values()) == set(range(devices))
    assert 0.8 * devices < found.speed_up <= devices
    assert f"{found.speed_up:.2f} times (simulated)" in str(found)
    machinery = Machinery(tasks, devices, footprint)
    on_threads(found.schedule, doing(found, machinery))
    assert machinery.results() == in_order(tasks, footprint)
    assert machinery.backend.calls.count("copy") == len(found.placed.copies) >= devices - 1


def test_a_slow_connection_keeps_the_work_together() -> None:
    tasks = [Task("a", writes=frozenset({0}), seconds=1e-3), Task("b", frozenset({0}), frozenset({1}), seconds=1e-3)]
    tasks += [Task("c", frozenset({0}), frozenset({2}), seconds=1e-3)]
    footprint = Footprint(dict.fromkeys(range(3), 10**9), frozenset(), frozenset({1, 2}))
    slow = forecast(graph(tasks), footprint, Machine(2, bandwidth=1e9))
    fast = forecast(graph(tasks), footprint, Machine(2, bandwidth=1e14, latency=0))
    assert not slow.placed.copies
    assert len(fast.placed.copies) == 2  # a's result to the second device, c's back
    assert slow.speed_up == pytest.approx(1)
    assert fast.speed_up == pytest.approx(1.5, rel=0.1)


def test_a_machine_must_be_one() -> None:
    for wrong in ({"devices": 0}, {"devices": 2, "lanes": 0}, {"devices": 2, "bandwidth": 0.0}):
        with pytest.raises(EngineError, match="no such machine"):
            Machine(**wrong)  # type: ignore[arg-type]
