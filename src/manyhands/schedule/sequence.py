"""One schedule of several that run one after the other, for pictures, timelines and forecasts.

Between two schedules stands a task of the host, the break: it depends on all tasks before it, and all tasks after it
depend on it. Memories get new numbers, so that two programs have none in common; lanes of the same device, kind and
number become the same lane.

a, b | c becomes a, b -> break -> c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Lane, Schedule, needed_waits
from manyhands.schedule.memory import Footprint
from manyhands.schedule.task import Task


@dataclass(frozen=True, slots=True)
class Part:
    """One of the schedules, and what it is called."""

    name: str
    schedule: Schedule
    footprint: Footprint


def one_after_another(parts: Sequence[Part]) -> tuple[Schedule, Footprint]:
    """One schedule of all of them, in their order."""
    tasks: list[Task] = []
    lane_of: list[int] = []
    order: list[int] = []
    lanes: dict[Lane, int] = {}
    numbers: dict[tuple[int, int | None], int] = {}  # of each part's memories; None: of the break before it
    sizes: dict[int, int] = {}
    inputs: set[int] = set()
    results: set[int] = set()
    last_break, gate = 0, frozenset[int]()  # the task of the last break, and the memory that it writes
    for part_number, part in enumerate(parts):

        def renumbered(memories: Iterable[int | None], part_number: int = part_number) -> frozenset[int]:
            return frozenset(numbers.setdefault((part_number, memory), len(numbers)) for memory in memories)

        if part_number:
            done = frozenset[int]().union(*(task.writes for task in tasks[last_break:]))
            last_break, gate = len(tasks), renumbered([None])
            order.append(last_break)
            lane_of.append(lanes.setdefault(Lane("cpu", "host"), len(lanes)))
            tasks.append(Task(f"Python, then {part.name}", done, gate, kind="host", seconds=0.0))
        order += [len(tasks) + number for number in part.schedule.order]
        lane_of += [lanes.setdefault(part.schedule.lanes[lane], len(lanes)) for lane in part.schedule.lane_of]
        for task in part.schedule.graph.tasks:
            tasks.append(replace(task, reads=renumbered(task.reads) | gate, writes=renumbered(task.writes)))
        for memory, size in part.footprint.sizes.items():
            sizes |= dict.fromkeys(renumbered([memory]), size)
        inputs |= renumbered(part.footprint.inputs)
        results |= renumbered(part.footprint.results)
    whole = graph(tasks)
    waits = needed_waits(whole.needs, lane_of, order)
    return Schedule(whole, tuple(lanes), tuple(lane_of), tuple(order), waits), Footprint(
        sizes, frozenset(inputs), frozenset(results)
    )
