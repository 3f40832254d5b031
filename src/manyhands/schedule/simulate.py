"""Simulates a schedule on a described machine: when each task would run.

Tasks on one device share it. As long as the parts of the device that they fill add up to no more than the whole, all
run at full speed; beyond that all slow down in the same proportion. So two kernels that fill a tenth of a chip each
overlap at no cost, and two that fill all of it take as long together as one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.schedule.graph import Task
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in seconds: no schedule beats the first two, and this schedule does not beat the third."""

    critical_path: float  # the longest chain
    busiest_device: float  # working without a gap
    busiest_lane: float  # of this schedule

    @property
    def seconds(self) -> float:
        return max(self.critical_path, self.busiest_device)


def bounds(schedule: Schedule) -> Bounds:
    work: dict[tuple[str, str], float] = {}
    lanes = [0.0] * len(schedule.lanes)
    for task, lane in zip(schedule.graph.tasks, schedule.lane_of, strict=True):
        key = (task.device, task.kind)
        work[key] = work.get(key, 0.0) + task.seconds * task.share
        lanes[lane] += task.seconds
    return Bounds(schedule.graph.critical_path(), max(work.values(), default=0.0), max(lanes, default=0.0))


def simulate(schedule: Schedule, *, wait_seconds: float = 0.0) -> Timeline:
    """Simulate the schedule; ``wait_seconds`` is the cost of a wait for another lane."""
    return timeline_of(schedule, moments(schedule, wait_seconds=wait_seconds), "simulated")


def timeline_of(schedule: Schedule, intervals: Sequence[tuple[float, float]], title: str) -> Timeline:
    """A picture of when each task began and ended, measured or simulated."""
    tasks, lanes = schedule.graph.tasks, schedule.names()
    spans = [
        Span(tasks[number].name, lanes[schedule.lane_of[number]], *intervals[number]) for number in range(len(tasks))
    ]
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start, span.stop))), title)


def moments(schedule: Schedule, *, wait_seconds: float = 0.0) -> list[tuple[float, float]]:
    """When each task would begin and end."""
    queues = [list(reversed(lane)) for lane in schedule.per_lane()]
    tasks = schedule.graph.tasks
    over: dict[int, float] = {}
    running: dict[int, tuple[int, float, float]] = {}  # lane: (task, when it began, seconds of work left)
    intervals = [(0.0, 0.0)] * len(tasks)
    now = 0.0
    while any(queues) or running:
        opens: list[float] = []  # when idle lanes may start
        for lane, queue in enumerate(queues):
            waits = schedule.waits.get(queue[-1], ()) if queue else ()
            if lane in running or not queue or any(other not in over for other in waits):
                continue
            may_start = max((over[other] + wait_seconds for other in waits), default=0.0)
            if may_start > now + 1e-15:
                opens.append(may_start)
            else:
                task = queue.pop()
                running[lane] = (task, now, max(tasks[task].seconds, 1e-12))
        slow = _slowdown([tasks[task] for task, _, _ in running.values()])
        ends = [now + left * slow[tasks[task].device, tasks[task].kind] for task, _, left in running.values()]
        now_next = min([*ends, *opens])
        for lane, (task, began, left) in list(running.items()):
            left -= (now_next - now) / slow[tasks[task].device, tasks[task].kind]
            if left > 1e-15:
                running[lane] = (task, began, left)
            else:
                del running[lane]
                over[task] = now_next
                intervals[task] = (began, now_next)
        now = now_next
    return intervals


def _slowdown(running: Sequence[Task]) -> dict[tuple[str, str], float]:
    filled: dict[tuple[str, str], float] = {}
    for task in running:
        filled[task.device, task.kind] = filled.get((task.device, task.kind), 0.0) + task.share
    return {key: max(1.0, value) for key, value in filled.items()}
