"""Proves that a schedule keeps every order that matters. It deliberately shares no code with the scheduler.

It looks only at the tasks, the order on each lane and the waits. From these it computes, for every task, the set of
tasks that are certainly done when it starts. Any two tasks that touch the same memory (at least one of them writing),
or that carry the same token (both draw random numbers of a device, or both have effects on the host), must be ordered
by that relation, in the order of the program.
"""

from __future__ import annotations

import itertools

from manyhands.errors import UnsafeSchedule
from manyhands.schedule.lanes import Schedule


def check(schedule: Schedule) -> None:
    """Raise :class:`UnsafeSchedule` unless every conflicting pair of tasks is ordered."""
    before = _certainly_before(schedule)
    for first, second, why in conflicts(schedule):
        if not before[second] >> first & 1:
            raise UnsafeSchedule(
                f"nothing makes {_name_of(schedule, second)} wait for {_name_of(schedule, first)}: {why}"
            )


def _name_of(schedule: Schedule, task: int) -> str:
    return f"{schedule.graph.tasks[task].name} (task {task}, {schedule.lanes[schedule.lane_of[task]]})"


def conflicts(schedule: Schedule) -> list[tuple[int, int, str]]:
    """Pairs that must be ordered. Pairs further apart follow, because "done before" is transitive."""
    pairs: list[tuple[int, int, str]] = []
    accesses: dict[int, list[tuple[int, bool]]] = {}
    tokens: dict[str, list[int]] = {}
    for index, task in enumerate(schedule.graph.tasks):
        for memory in task.reads | task.writes:
            accesses.setdefault(memory, []).append((index, memory in task.writes))
        if task.token is not None:
            tokens.setdefault(task.token, []).append(index)
    for memory, touched in accesses.items():
        writer: int | None = None
        readers: list[int] = []
        for index, writes in touched:
            if writer is not None:
                pairs.append((writer, index, f"write, then {'write' if writes else 'read'} of memory {memory}"))
            if writes:
                pairs += [(reader, index, f"read, then write of memory {memory}") for reader in readers]
                writer, readers = index, []
            else:
                readers.append(index)
    for token, members in tokens.items():
        pairs += [(a, b, f"both are {token}") for a, b in itertools.pairwise(members)]
    return pairs


def _certainly_before(schedule: Schedule) -> list[int]:
    """For each task a set (the bits of a number) of all tasks that are done when it starts."""
    count = len(schedule.graph)
    if sorted(schedule.order) != list(range(count)):
        raise UnsafeSchedule("not every task is issued exactly once")
    before = [0] * count
    issued = 0
    last_on_lane: dict[int, int] = {}
    for task in schedule.order:
        lane = schedule.lane_of[task]
        past = list(schedule.waits.get(task, ()))
        if lane in last_on_lane:
            past.append(last_on_lane[lane])
        for other in past:
            if not issued >> other & 1:
                raise UnsafeSchedule(
                    f"task {task} waits for task {other}, which is issued later: it would wait for ever"
                )
            before[task] |= before[other] | 1 << other
        issued |= 1 << task
        last_on_lane[lane] = task
    return before
