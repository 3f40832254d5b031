"""A task: one call, with the memory it touches, the device it runs on, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

# Copies to and from a GPU have separate lanes: a GPU has a copy engine for each direction.
Kind = Literal["compute", "copy in", "copy out", "copy", "host"]


@dataclass(frozen=True, slots=True)
class Task:
    """One call: what it touches, where it runs, what it costs."""

    name: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    device: str = "cpu"
    kind: Kind = "compute"
    seconds: float = 1e-6
    # The part of its device that it fills while it runs: two tasks of 0.5 run side by side at full speed.
    share: float = 1.0
    # Tasks with the same token keep the program's order: random numbers of a device, effects on the host.
    token: str | None = None
    # For pictures: the shape of its result, the path of the module that calls it (layers.0.attention), and whether its
    # result is only a view of existing memory.
    detail: str = field(default="", compare=False)
    module: str = field(default="", compare=False)
    is_view: bool = field(default=False, compare=False)


def needs(tasks: Iterable[Task]) -> list[set[int]]:
    """For each task, the earlier tasks that it needs directly.

    Of two tasks that touch the same memory, at least one of them writing, the earlier comes first. The same holds for
    two tasks with the same token.
    """
    all_needs: list[set[int]] = []
    last_write: dict[int, int] = {}
    reads_since: dict[int, list[int]] = {}
    last_of_token: dict[str, int] = {}
    for index, task in enumerate(tasks):
        needed: set[int] = set()
        for memory in task.reads | task.writes:
            if memory in last_write:
                needed.add(last_write[memory])
        for memory in task.writes:
            needed.update(reads_since.pop(memory, ()))
            last_write[memory] = index
        for memory in task.reads - task.writes:
            reads_since.setdefault(memory, []).append(index)
        if task.token is not None:
            if task.token in last_of_token:
                needed.add(last_of_token[task.token])
            last_of_token[task.token] = index
        all_needs.append(needed)
    return all_needs
