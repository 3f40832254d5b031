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
_IN_VAIN = 3  # runs that were started and thrown away, after which guards are asked first


@dataclass
class Planned(Guarded):
    """What is known of one signature."""

    run: Run
    way: Way = AS_WRITTEN
    exactness: Exactness | None = None  # of its results, compared with those of plain execution
    schedule: Schedule | None = None
    trace: object | None = None  # that the schedule is of, where it is not the one that was planned
    threads: int = 1  # of the CPU, that its lanes share
    reuse_outputs: bool = False  # whether the next call may overwrite the results of one
    seconds: dict[Way, float] = field(default_factory=dict)
    predicted: dict[Way, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    planning: str = ""  # how long planning took, in words
    retry: bool = False  # plan again at the next call
    cannot_be_one: bool = False  # it cannot be captured as one graph, but perhaps in pieces
    regions_after: int | None = None  # calls after which it pays to compile regions; None: they are not waited for
    # Tries compiled regions with the arguments of a call, and gives the better plan.
    with_regions: Callable[[Call], Planned] | None = None
    costed: Costed | None = None
    footprint: Footprint | None = None
    peaks: Peaks | None = None
    advice: Sequence[str] = ()
    pieces: Pieces | None = None  # where it cannot be captured as one graph
    about_runtime: str = ""  # where the framework runs the schedule: what of it is known
    # Runs the schedule once more and gives when each task began and ended.
    timed: Callable[[], Sequence[tuple[float, float]]] | None = None
    # Starts a run before it is known whether it is wanted, as it leaves nothing but results; ``NOT_STARTED``
    # where it cannot. Guards are then asked while the device works.
    ahead: Callable[[Sequence[object]], object] | None = None
    in_vain: int = 0  # runs that were started so, and refused by the guards
    # Of each run that was tried what starts it so.
    starts: dict[Run, Callable[[Sequence[object]], object]] = field(default_factory=dict)
    # Recognises a call like the one that was planned, and gives its tensors.
    fits: Callable[[tuple[object, ...], dict[str, object]], list[object] | None] | None = None

    def was_refused(self, *, started: bool) -> None:
        """Its guards have refused a call; ``started``: for which a run had been started."""
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
    anyway: int  # bytes more that do not matter: a hundredth of the device's memory

    def most(self, plain: int) -> int:
        """Bytes that a plan may take at its peak."""
        return max(int(self.times * plain), plain + self.anyway)

    def allows(self, planned: int, plain: int) -> bool:
        return planned <= self.most(plain)


def why_too_large(way: Way, peak: int, plain: int, limit: Limit) -> str | None:
    """Why a plan is not tried because of its memory, or None."""
    if limit.allows(peak, plain):
        return None
    return (
        f"{way} is not tried: it would take {megabytes(peak)} at its peak, plain execution {megabytes(plain)} "
        f"(parallel(fn, memory={math.ceil(10 * peak / max(plain, 1) + 0.1) / 10}) allows it)"
    )
