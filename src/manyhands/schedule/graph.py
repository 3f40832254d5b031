"""Tasks, and the graph of a program: which earlier tasks each task depends on.

A program is a list of tasks in the order in which it was written. The graph keeps only the part of that order that
matters: of two tasks that touch the same memory, at least one of them writing, the earlier comes first (read after
write, write after read, write after write); and tasks that draw random numbers or have effects on the host keep their
order.

Example: a writes x, b writes y, c reads x and writes z, d reads y and z, e writes x again. Then c depends on a, d on b
and c, and e on c (it must not overwrite x while c reads it), but neither on b nor on d.
"""

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


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks in program order, and for each the earlier ones that it needs directly."""

    tasks: tuple[Task, ...]
    needs: tuple[frozenset[int], ...]
    followers: tuple[tuple[int, ...], ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.tasks)

    def work(self) -> float:
        """Seconds of all tasks one after the other."""
        return sum(task.seconds for task in self.tasks)

    def chains(self) -> list[float]:
        """For each task the seconds of the longest chain that ends with it, its own included."""
        lengths: list[float] = []
        for task, earlier in zip(self.tasks, self.needs, strict=True):
            lengths.append(task.seconds + max((lengths[need] for need in earlier), default=0.0))
        return lengths

    def critical_path(self) -> float:
        """Seconds of the longest chain: no number of lanes is faster."""
        return max(self.chains(), default=0.0)


def graph(tasks: Iterable[Task]) -> Graph:
    """The graph of a program: who needs whom, by the memories they touch."""
    listed = tuple(tasks)
    needs: list[set[int]] = []
    followers: list[list[int]] = [[] for _ in listed]
    last_write: dict[int, int] = {}
    reads_since: dict[int, list[int]] = {}
    last_of_token: dict[str, int] = {}
    for index, task in enumerate(listed):
        needed = {last_write[memory] for memory in task.reads | task.writes if memory in last_write}
        for memory in task.writes:
            needed.update(reads_since.pop(memory, ()))
            last_write[memory] = index
        for memory in task.reads - task.writes:
            reads_since.setdefault(memory, []).append(index)
        if task.token is not None:
            if task.token in last_of_token:
                needed.add(last_of_token[task.token])
            last_of_token[task.token] = index
        for need in needed:
            followers[need].append(index)
        needs.append(needed)
    return Graph(listed, tuple(map(frozenset, needs)), tuple(map(tuple, followers)))
