"""Joins schedules that run one after the other into one schedule, for pictures, timelines and forecasts.

Between two schedules stands a task of the host, the break: it depends on all tasks before it, and all tasks after it
depend on it. Memories get new numbers, so that two programs have none in common; lanes of the same device, kind and
number become the same lane.

a, b | c becomes a, b -> break -> c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Lane, Schedule
from manyhands.schedule.memory import Footprint
from manyhands.schedule.task import Task


@dataclass(frozen=True, slots=True)
class Part:
    """One of the schedules, and what it is called."""

    name: str
    schedule: Schedule
    footprint: Footprint


def joined(parts: Sequence[Part]) -> tuple[Schedule, Footprint]:
    """One schedule of all of them, in their order."""
    whole = _Joined()
    for number, part in enumerate(parts):
        if number:
            whole.add_break(part.name)
        whole.add(part)
    return whole.schedule(), Footprint(whole.sizes, frozenset(whole.inputs), frozenset(whole.results))


class _Joined:
    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.inputs: set[int] = set()
        self.results: set[int] = set()
        self._tasks: list[Task] = []
        self._lanes: dict[Lane, int] = {}
        self._lane_of: list[int] = []
        self._order: list[int] = []
        self._waits: dict[int, tuple[int, ...]] = {}
        self._memories = 0  # numbers that are taken
        self._written: set[int] = set()  # since the last break
        self._gate: int | None = None  # the memory that the last break writes, and the number of its task
        self._break = -1

    def add(self, part: Part) -> None:
        schedule = part.schedule
        first = len(self._tasks)
        numbers: dict[int, int] = {}
        for task in schedule.graph.tasks:
            for memory in sorted(task.reads | task.writes):
                numbers.setdefault(memory, self._memories + len(numbers))
        for memory in sorted({*part.footprint.sizes, *part.footprint.inputs, *part.footprint.results}):
            numbers.setdefault(memory, self._memories + len(numbers))
        self._memories += len(numbers)
        self.sizes |= {numbers[memory]: size for memory, size in part.footprint.sizes.items()}
        self.inputs |= {numbers[memory] for memory in part.footprint.inputs}
        self.results |= {numbers[memory] for memory in part.footprint.results}
        lanes = [self._lanes.setdefault(lane, len(self._lanes)) for lane in schedule.lanes]
        for task, needs, lane in zip(schedule.graph.tasks, schedule.graph.needs, schedule.lane_of, strict=True):
            reads = {numbers[memory] for memory in task.reads}
            if self._gate is not None and not needs:
                reads.add(self._gate)
                self._waits[len(self._tasks)] = (self._break,)
            writes = {numbers[memory] for memory in task.writes}
            self._written |= writes
            self._tasks.append(replace(task, reads=frozenset(reads), writes=frozenset(writes)))
            self._lane_of.append(lanes[lane])
        self._order += [first + number for number in schedule.order]
        for number, waits in schedule.waits.items():
            self._waits[first + number] = (*self._waits.get(first + number, ()), *(first + other for other in waits))

    def add_break(self, name: str) -> None:
        """Add the task that stands for the Python code before the part of this name."""
        last = {self._lane_of[task]: task for task in self._order}
        self._break, self._gate = len(self._tasks), self._memories
        self._memories += 1
        done = frozenset(self._written)
        self._tasks.append(Task(f"Python, then {name}", done, frozenset({self._gate}), kind="host", seconds=0.0))
        lane = self._lanes.setdefault(Lane("cpu", "host"), len(self._lanes))
        self._lane_of.append(lane)
        self._order.append(self._break)
        self._waits[self._break] = tuple(task for lane_of_task, task in last.items() if lane_of_task != lane)
        self._written = set()

    def schedule(self) -> Schedule:
        return Schedule(
            graph(self._tasks), tuple(self._lanes), tuple(self._lane_of), tuple(self._order), dict(self._waits)
        )
