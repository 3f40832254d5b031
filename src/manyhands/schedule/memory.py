"""Predicts how much memory a schedule takes at its peak, and how much plain execution takes.

A memory is allocated by the first task that writes to it and freed after the last task that touches it. Arguments and
tensors from outside exist all the time; results stay. Several lanes hold more at once than one lane does, for two
reasons: several chains are in progress, and on a GPU memory can be reused only when the lane that allocated it knows
that all of its users are done.

Three tasks of one megabyte each in a chain take two megabytes at the peak: the second is computed while the first is
read. Two such chains on two lanes take four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.schedule.graph import Task


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of every memory of a program; which of them exist before it runs, and which stay after it."""

    sizes: Mapping[int, int]
    inputs: frozenset[int]
    results: frozenset[int]

    def input_bytes(self) -> int:
        return sum(self.sizes.get(memory, 0) for memory in self.inputs)

    def result_bytes(self) -> int:
        return sum(self.sizes.get(memory, 0) for memory in self.results)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes at the peak of the plan, and of plain execution (at least: Python may hold on to more)."""

    planned: int
    plain: int

    @property
    def times(self) -> float:
        return self.planned / max(self.plain, 1)


def peak(
    tasks: Sequence[Task],
    footprint: Footprint,
    moments: Sequence[tuple[float, float]],
    released_after: Mapping[int, int] | None = None,
) -> int:
    """The peak in bytes, if each task begins and ends at its ``moments``.

    ``released_after`` names for each memory the task after which it is freed; a memory that it does not name stays.
    Without it every memory is freed after its last user.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for number, task in enumerate(tasks):
        start, stop = moments[number]
        for memory in task.reads | task.writes:
            if memory in footprint.sizes and memory not in footprint.inputs:
                begins[memory] = min(begins.get(memory, start), start)
                ends[memory] = max(ends.get(memory, stop), stop)
    if released_after is not None:
        ends = {memory: moments[released_after[memory]][1] for memory in ends if memory in released_after}
    events = [(when, 1, footprint.sizes[memory]) for memory, when in begins.items()]
    events += [(when, 0, -footprint.sizes[memory]) for memory, when in ends.items() if memory not in footprint.results]
    held = worst = footprint.input_bytes()
    for _, _, size in sorted(events):
        held += size
        worst = max(worst, held)
    return worst


def one_after_the_other(order: Sequence[int]) -> list[tuple[float, float]]:
    """When each task begins and ends if they run in this order, each for one unit of time."""
    moments = [(0.0, 0.0)] * len(order)
    for place, task in enumerate(order):
        moments[task] = (float(place), place + 1.0)
    return moments


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
