"""Forecasts how long a program takes on a described machine: N devices, lanes on each, a bandwidth between them.

The tasks of a program are placed one by one, beginning with the one that starts the longest chain (HEFT, as in
:mod:`manyhands.schedule.lanes`). Each goes to the device on which it would end first, including the copies that it
needs. The devices on which a memory is valid are tracked: a task that reads it on another device gets a copy, and a
task that writes it makes all other copies stale. The outcome is again a program, of tasks and copies in an order that
could be run, with a separate memory on every device; so it is scheduled, checked and simulated like any other.

Example: a writes x, b writes y, c reads both. On two devices a goes to the first and b to the second, y is copied to
the first, and c runs there: a | b, copy | c.

Arguments that no task writes to are on every device from the start, as parameters are; others are on the first one,
and results come back to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manyhands.amounts import count_of
from manyhands.errors import EngineError
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph, Task, graph
from manyhands.schedule.lanes import Lane, Schedule, schedule, upward_ranks
from manyhands.schedule.memory import Footprint, megabytes
from manyhands.schedule.simulate import bounds, simulate


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind, and what is between them."""

    devices: int
    lanes: int = 1  # to compute, on each device
    bandwidth: float = 25e9  # bytes a second into each device
    latency: float = 10e-6  # seconds before a copy begins

    def __post_init__(self) -> None:
        if self.devices < 1 or self.lanes < 1 or not self.bandwidth > 0 or self.latency < 0:
            raise EngineError(
                f"no such machine: devices={self.devices}, lanes={self.lanes}, bandwidth={self.bandwidth:g}, "
                f"latency={self.latency:g}: give at least one device and one lane, a bandwidth above 0, and a latency "
                "of at least 0"
            )

    def copy_seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth

    def all_lanes(self) -> list[Lane]:
        names = [f"device:{number}" for number in range(self.devices)]
        compute = [Lane(name, "compute", lane) for name in names for lane in range(self.lanes)]
        return compute + [Lane(name, "copy") for name in names]


@dataclass(frozen=True, slots=True)
class Placed:
    """A program for several devices: tasks and copies, each with the task it stands for or the memory it brings."""

    tasks: list[Task] = field(default_factory=list)
    origin: list[int] = field(default_factory=list)  # the task's number in the program; -1 for a copy
    copies: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # place: (memory, from device, to device)
    device_of: dict[int, int] = field(default_factory=dict)  # of the program's tasks


@dataclass(frozen=True, slots=True)
class ScheduleForecast:
    """A proved schedule on a described machine, and what simulation says of it."""

    machine: Machine
    placed: Placed
    schedule: Schedule
    seconds: float
    alone: float  # seconds on one device of the kind
    moved: int  # bytes

    @property
    def speed_up(self) -> float:
        return self.alone / max(self.seconds, 1e-12)

    def __str__(self) -> str:
        machine, limit = self.machine, bounds(self.schedule)
        reason = "critical path" if limit.critical_path >= limit.busiest_device else "busiest device"
        copies = count_of(len(self.placed.copies), "copy", "copies")
        return (
            f"{count_of(machine.devices, 'device')} of {count_of(machine.lanes, 'lane')}, {machine.bandwidth / 1e9:g} "
            f"GB/s between them: {self.seconds * 1e3:.3f} ms, one device {self.alone * 1e3:.3f} ms: "
            f"{self.speed_up:.2f} times (simulated); {copies} of {megabytes(self.moved)}; no "
            f"schedule beats {limit.seconds * 1e3:.3f} ms ({reason})"
        )


def forecast(program: Graph, footprint: Footprint, machine: Machine) -> ScheduleForecast:
    """Place, schedule, prove and simulate a program on a machine."""
    placed = place(program, footprint, machine)
    planned = schedule(graph(placed.tasks), machine.all_lanes())
    check(planned)
    moved = sum(footprint.sizes.get(memory, 0) for memory, _, _ in placed.copies.values())
    seconds = simulate(planned).seconds
    alone = seconds if machine.devices == 1 else forecast(program, footprint, replace(machine, devices=1)).seconds
    return ScheduleForecast(machine, placed, planned, seconds, alone, moved)


def place(program: Graph, footprint: Footprint, machine: Machine) -> Placed:
    """Choose a device for every task of a program, and put in the copies that this needs."""
    places = _Validity(program, footprint, machine)
    free = [[0.0] * machine.lanes for _ in range(machine.devices)]
    end = [0.0] * len(program)
    rank = upward_ranks(program)
    missing = [len(needs) for needs in program.needs]
    ready = [(-rank[i], i) for i in range(len(program)) if not missing[i]]
    heapq.heapify(ready)
    while ready:
        _, number = heapq.heappop(ready)
        task = program.tasks[number]
        there = max((end[need] for need in program.needs[number]), default=0.0)
        start, device = min(
            (max(min(free[device]), there + places.copy_seconds(number, device)), device)
            for device in range(machine.devices)
        )
        lane = free[device].index(min(free[device]))
        end[number] = free[device][lane] = start + task.seconds
        places.add(number, device)
        for follower in program.followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (-rank[follower], follower))
    places.gather()
    return places.placed


class _Validity:
    """Where each memory is valid, and the program that comes of it."""

    def __init__(self, program: Graph, footprint: Footprint, machine: Machine) -> None:
        self._program, self._machine = program, machine
        self._sizes: Mapping[int, int] = footprint.sizes
        self._permanent = footprint.results | footprint.inputs
        written = frozenset().union(*(task.writes for task in program.tasks))
        everywhere = set(range(machine.devices))
        self._valid: dict[int, set[int]] = {
            memory: {0} if memory in written else set(everywhere) for memory in footprint.inputs
        }
        self._names: dict[tuple[int, int], int] = {}
        self.placed = Placed()

    def _name(self, memory: int, device: int) -> int:
        """The number of a memory on a device; what has no bytes (a handle) is the same thing everywhere."""
        key = (memory, device if memory in self._sizes else -1)
        return self._names.setdefault(key, len(self._names))

    def _elsewhere(self, number: int, device: int) -> list[int]:
        """The memories that a task needs, and that are valid on other devices only."""
        task = self._program.tasks[number]
        needed = task.reads | task.writes
        return [m for m in needed if m in self._sizes and device not in self._valid.get(m, {device})]

    def copy_seconds(self, number: int, device: int) -> float:
        return sum(self._machine.copy_seconds(self._sizes[m]) for m in self._elsewhere(number, device))

    def add(self, number: int, device: int) -> None:
        for memory in sorted(self._elsewhere(number, device)):
            self._copy(memory, device)
        task = self._program.tasks[number]
        reads = frozenset(self._name(memory, device) for memory in task.reads)
        writes = frozenset(self._name(memory, device) for memory in task.writes)
        for memory in task.writes:
            self._valid[memory] = {device}
        self.placed.tasks.append(replace(task, reads=reads, writes=writes, device=f"device:{device}", kind="compute"))
        self.placed.origin.append(number)
        self.placed.device_of[number] = device

    def _copy(self, memory: int, device: int) -> None:
        source = min(self._valid[memory])
        seconds = self._machine.copy_seconds(self._sizes[memory])
        reads, writes = frozenset({self._name(memory, source)}), frozenset({self._name(memory, device)})
        self.placed.copies[len(self.placed.tasks)] = (memory, source, device)
        self.placed.tasks.append(Task("copy", reads, writes, f"device:{device}", "copy", seconds))
        self.placed.origin.append(-1)
        self._valid[memory].add(device)

    def gather(self) -> None:
        """Results, and arguments that were written to, go to the first device."""
        for memory in sorted(self._valid):
            if memory in self._sizes and memory in self._permanent and 0 not in self._valid[memory]:
                self._copy(memory, 0)
