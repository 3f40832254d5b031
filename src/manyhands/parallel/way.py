"""The ways to run a function, and how close their results are to plain execution's. Both are data; text is for people.

>>> print(Way(Executor.GRAPH, "3 lanes", compiled=True))
fused, 3 lanes, one graph
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Executor(enum.Enum):
    """What executes the operations."""

    AS_WRITTEN = "plain execution"
    CALLERS_THREAD = "the schedule's order in the caller's thread (synchronous)"
    THREADS = "CPU threads"
    GRAPH = "one graph"  # a CUDA graph that is captured once and replayed
    STREAMS = "issued at every call"  # CUDA streams


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a function."""

    executor: Executor
    lanes: str = ""  # how the schedule divides the work: "one lane", "2 beside the critical path"
    one_thread: bool = False  # each operation uses one thread of the CPU
    compiled: bool = False  # runs of small operations are compiled to one each

    def __str__(self) -> str:
        words = ["fused"] if self.compiled else []
        words += [self.lanes] if self.lanes else []
        words += [] if self.executor is Executor.THREADS else [self.executor.value]
        return ", ".join([*words, *(["one thread"] if self.one_thread else [])])

    @property
    def is_plain(self) -> bool:
        return self.executor is Executor.AS_WRITTEN


AS_WRITTEN = Way(Executor.AS_WRITTEN)


@dataclass(frozen=True, slots=True)
class Exactness:
    """How close a way's results are to plain execution's: to the bit, or as ``words`` say."""

    to_the_bit: bool
    words: str

    def __str__(self) -> str:
        return self.words


TO_THE_BIT = Exactness(True, "equal to the bit")


def close(difference: float) -> Exactness:
    """Results that differ by ``difference``, relative to their size, because another kernel sums in another order."""
    return Exactness(False, f"equal to {difference:.0e}")
