"""The plan of one signature: how its calls are run, why, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manyhands.backends.planning import Call, Run
from manyhands.parallel.costs import Costed
from manyhands.parallel.plan_cache import Guarded
from manyhands.parallel.way import AS_WRITTEN, Exactness, Way
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint, Peaks, megabytes

if TYPE_CHECKING:
    from manyhands.parallel.pieces import Pieces

NOT_STARTED = object()
_IN_VAIN = 3  # runs started and discarded, after which guards are checked first


@dataclass
class Planned(Guarded):
    """The plan of one signature, and what is known about it."""

    run: Run
    way: Way = AS_WRITTEN
    exactness: Exactness | None = None  # of its results, compared with those of plain execution
    schedule: Schedule | None = None
    trace: object | None = None  # the schedule's trace, if it is not the one that was planned
    threads: int = 1  # CPU threads that its lanes share
    reuse_outputs: bool = False  # whether the next call may overwrite a call's results
    seconds: dict[Way, float] = field(default_factory=dict)
    predicted: dict[Way, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    planning: str = ""  # how long planning took, in words
    retry: bool = False  # plan again at the next call
    cannot_be_one: bool = False  # it cannot be captured as one graph, but perhaps in pieces
    regions_after: int | None = None  # calls after which trying what is left pays; None: nothing is left
    uncompiled_are_left: bool = False  # plans of uncompiled operations were postponed
    regions_are_left: bool = False  # and those with compiled regions
    # Tries compiled regions with the arguments of a call, and returns the better plan.
    with_regions: Callable[[Call], Planned] | None = None
    costed: Costed | None = None
    footprint: Footprint | None = None
    peaks: Peaks | None = None
    advice: Sequence[str] = ()
    pieces: Pieces | None = None  # if it cannot be captured as one graph
    # Runs the schedule once more and returns when each task began and ended.
    timed: Callable[[], Sequence[tuple[float, float]]] | None = None
    # Starts a run before the guards are checked: it has no effects besides its results. Guards are then checked
    # while the device works. Returns ``NOT_STARTED`` if it cannot start.
    ahead: Callable[[Sequence[object]], object] | None = None
    in_vain: int = 0  # runs started ahead and refused by the guards
    # For each run that was tried, the function that starts it ahead.
    starts: dict[Run, Callable[[Sequence[object]], object]] = field(default_factory=dict)
    # Recognises a call like the planned one, and returns its tensors.
    fits: Callable[[tuple[object, ...], dict[str, object]], list[object] | None] | None = None

    def was_refused(self, *, started: bool) -> None:
        """Called when its guards have refused a call; ``started``: a run had been started for it."""
        self.in_vain += started
        if self.in_vain >= _IN_VAIN:
            self.ahead = None

    @property
    def how(self) -> str:
        """The way and its exactness, for people."""
        return f"{self.way}" if self.exactness is None else f"{self.way}, {self.exactness}"


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
