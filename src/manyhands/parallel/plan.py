"""The plan of one graph: how it is run, why, and what it costs. It is built once, by :mod:`.planner`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.parallel.way import AS_WRITTEN, Exactness, Way
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint, Peaks, megabytes


@dataclass(frozen=True)
class Plan:
    """How a graph is run for arguments of one form."""

    # Gives the results for the tensors of a call, both as flat lists.
    run: Callable[[Sequence[object]], list[object]]
    way: Way = AS_WRITTEN
    exactness: Exactness | None = None  # of its results, compared with those of the graph run operation by operation
    schedule: Schedule | None = None
    footprint: Footprint | None = None
    peaks: Peaks | None = None
    seconds: Mapping[Way, float] = field(default_factory=dict)
    predicted: Mapping[Way, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    advice: Sequence[str] = ()
    costs: str = ""  # where the costs of its tasks come from, in words
    planning: str = ""  # how long planning took, in words
    writes: bool = False  # to its arguments, so that a run that failed cannot be repeated
    left_after: int | None = None  # calls after which trying the candidates that are left pays; None: none are left
    # Runs the schedule once more and returns when each task began and ended.
    timed: Callable[[], Sequence[tuple[float, float]]] | None = None

    @property
    def how(self) -> str:
        """The way and its exactness, for people."""
        return f"{self.way}" if self.exactness is None else f"{self.way}, {self.exactness}"

    @property
    def gain(self) -> float:
        """Seconds that a call saves, compared with running the graph operation by operation."""
        known = self.seconds.keys() >= {AS_WRITTEN, self.way}
        return self.seconds[AS_WRITTEN] - self.seconds[self.way] if known else 0.0


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


def why_too_large(way: Way, peak: int, plain: int, limit: Limit) -> str | None:
    """Why a plan takes too much memory to be tried, or None."""
    if limit.allows(peak, plain):
        return None
    return (
        f"{way} is not tried: it would take {megabytes(peak)} at its peak, plain execution {megabytes(plain)} "
        f"(parallel(fn, memory={math.ceil(10 * peak / max(plain, 1) + 0.1) / 10}) allows it)"
    )
