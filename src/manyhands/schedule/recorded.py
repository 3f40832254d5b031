"""Records the tasks and waits that are really issued to lanes, as a schedule that can be checked and shown.

A planner knows its schedule before anything runs. Where another engine decides the order while it runs (autograd in a
backward pass), tasks, marks and waits are recorded as they are issued, and the recording is the schedule. A wait holds
for the next task of its lane, and therefore for all tasks after that one.

Example: lane 0 issues ``a`` and makes a mark; lane 1 waits for that mark and issues ``b``; lane 0 issues ``c``. Then
the schedule has a and c on lane 0, b on lane 1, and one wait, of b for a. Between b and c there is no order.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Lane, Schedule


class Journal:
    """Tasks, marks and waits in the order in which they were issued."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._tasks: list[Task] = []
        self._lane_of: list[int] = []
        self._last: dict[int, int] = {}
        self._marks: list[int | None] = []  # the last task before each mark, if there was one
        self._waiting: dict[int, list[int]] = {}
        self._waits: dict[int, tuple[int, ...]] = {}

    def task(self, lane: int, task: Task) -> int:
        """Record a task that was issued to a lane; returns its number."""
        number = len(self._tasks)
        self._tasks.append(task)
        self._lane_of.append(lane)
        self._last[lane] = number
        if waited := self._waiting.pop(lane, None):
            self._waits[number] = tuple(dict.fromkeys(waited))
        return number

    def mark(self, lane: int) -> int:
        """Record a mark behind everything issued to a lane so far; returns the mark's number."""
        self._marks.append(self._last.get(lane))
        return len(self._marks) - 1

    def wait(self, lane: int, mark: int) -> None:
        """Everything issued to a lane from now on comes after the mark."""
        last = self._marks[mark]
        if last is not None:
            self._waiting.setdefault(lane, []).append(last)

    def rewrite(self, number: int, task: Task) -> None:
        """Replace a task: what it touches may be known only later."""
        self._tasks[number] = task

    def count(self, lane: int) -> int:
        """How many tasks were issued to a lane."""
        return self._lane_of.count(lane)

    def schedule(self) -> Schedule:
        """The recording as a schedule, in the order of issue."""
        order = tuple(range(len(self._tasks)))
        return Schedule(graph(self._tasks), self._lanes, tuple(self._lane_of), order, dict(self._waits))
