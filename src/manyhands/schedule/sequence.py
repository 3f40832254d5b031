"""One schedule of several that run one after the other, for pictures, timelines and forecasts.

Between two schedules stands a task of the host, the break: it depends on all tasks before it, and all tasks after it
depend on it. Memories get new numbers, so that two programs have none in common; lanes of the same device, kind and
number become the same lane.

a, b | c becomes a, b -> break -> c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Lane, Schedule, needed_waits
from manyhands.schedule.memory import Footprint

Part = tuple[str, Schedule, Footprint]  # one of the schedules, with what it is called


def one_after_another(parts: Sequence[Part]) -> tuple[Schedule, Footprint]:
    """One schedule of all of them, in their order."""
    tasks: list[Task] = []
    places: list[tuple[int, Lane]] = []  # the tasks in the order of issue, with their lanes
    numbers: dict[tuple[int, int | None], int] = {}  # of each part's memories; None: of the break before it
    sizes: dict[int, int] = {}
    inputs, results, gate = frozenset[int](), frozenset[int](), frozenset[int]()
    begin = 0
    for part_number, (name, schedule, footprint) in enumerate(parts):

        def renumber(memories: Iterable[int | None], part_number: int = part_number) -> frozenset[int]:
            return frozenset(numbers.setdefault((part_number, memory), len(numbers)) for memory in memories)

        if part_number:
            done = frozenset[int]().union(*(task.writes for task in tasks[begin:]))
            begin, gate = len(tasks), renumber([None])
            places.append((begin, Lane("cpu", "host")))
            tasks.append(Task(f"Python, then {name}", done, gate, kind="host", seconds=0.0))
        places += [(len(tasks) + task, schedule.lanes[schedule.lane_of[task]]) for task in schedule.order]
        for task in schedule.graph.tasks:
            tasks.append(replace(task, reads=renumber(task.reads) | gate, writes=renumber(task.writes)))
        for memory, size in footprint.sizes.items():
            sizes |= dict.fromkeys(renumber([memory]), size)
        inputs, results = inputs | renumber(footprint.inputs), results | renumber(footprint.results)
    whole, order, lanes = graph(tasks), [task for task, _ in places], tuple(dict.fromkeys(lane for _, lane in places))
    lane_of = [lanes.index(lane) for _, lane in sorted(places, key=lambda place: place[0])]
    waits = needed_waits(whole.needs, lane_of, order)
    return Schedule(whole, lanes, tuple(lane_of), tuple(order), waits), Footprint(sizes, inputs, results)
