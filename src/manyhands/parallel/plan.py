"""The plan of one graph: how it is run, why, and what it costs. It is built once, by :mod:`.planner`.

Methods, and how close their results are to plain execution's, are data; text is for people.

>>> print(Method(Executor.GRAPH, "3 lanes", compiled=True))
fused, 3 lanes, one graph
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint, Peaks, megabytes


class Executor(enum.Enum):
    """What executes the operations."""

    AS_WRITTEN = "plain execution"
    CALLERS_THREAD = "the schedule's order in the caller's thread (synchronous)"
    THREADS = "CPU threads"
    GRAPH = "one graph"  # a CUDA graph that is captured once and replayed
    STREAMS = "issued at every call"  # CUDA streams


@dataclass(frozen=True, slots=True)
class Method:
    """What executes the operations of a graph, and on which lanes."""

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


AS_WRITTEN = Method(Executor.AS_WRITTEN)


@dataclass(frozen=True, slots=True)
class Exactness:
    """How close a method's results are to plain execution's: to the bit, or as ``words`` say."""

    to_the_bit: bool
    words: str

    def __str__(self) -> str:
        return self.words


TO_THE_BIT = Exactness(True, "equal to the bit")


def close(difference: float) -> Exactness:
    """Results that differ by ``difference``, relative to their size, because another kernel sums in another order."""
    return Exactness(False, f"equal to {difference:.0e}")


@dataclass(frozen=True)
class Plan:
    """How a graph is run for arguments of one form."""

    # Gives the results for the tensors of a call, both as flat lists.
    run: Callable[[Sequence[object]], list[object]]
    method: Method = AS_WRITTEN
    exactness: Exactness | None = None  # of its results, compared with those of the graph run operation by operation
    schedule: Schedule | None = None
    footprint: Footprint | None = None
    peaks: Peaks | None = None
    seconds: Mapping[Method, float] = field(default_factory=dict)
    predicted: Mapping[Method, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    advice: Sequence[str] = ()
    costs: str = ""  # where the costs of its tasks come from, in words
    planning: str = ""  # how long planning took, in words
    left_after: int | None = None  # calls after which trying the candidates that are left pays; None: none are left
    # Runs the schedule once more and returns when each task began and ended.
    timed: Callable[[], Sequence[tuple[float, float]]] | None = None

    @property
    def how(self) -> str:
        """The method and its exactness, for people."""
        return f"{self.method}" if self.exactness is None else f"{self.method}, {self.exactness}"

    @property
    def gain(self) -> float:
        """Seconds that a call saves, compared with running the graph operation by operation."""
        known = self.seconds.keys() >= {AS_WRITTEN, self.method}
        return self.seconds[AS_WRITTEN] - self.seconds[self.method] if known else 0.0


@dataclass(frozen=True, slots=True)
class Limit:
    """How much more memory than plain execution a plan may take."""

    times: float
    anyway: int  # additional bytes that do not matter: a hundredth of the device's memory

    def most(self, plain: int) -> int:
        """The peak memory that a plan may take, in bytes."""
        return max(int(self.times * plain), plain + self.anyway)

    def allows(self, planned: int, plain: int) -> bool:
        return planned <= self.most(plain)


def why_too_large(method: Method, peak: int, plain: int, limit: Limit) -> str | None:
    """Why a plan takes too much memory to be tried, or None."""
    if limit.allows(peak, plain):
        return None
    return (
        f"{method} is not tried: it would take {megabytes(peak)} at its peak, plain execution {megabytes(plain)} "
        f"(parallel(fn, memory={math.ceil(10 * peak / max(plain, 1) + 0.1) / 10}) allows it)"
    )
