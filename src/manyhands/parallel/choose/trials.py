"""The trials of one graph: its candidates are run with the arguments of a call, compared with the graph, and timed.

A graph has no effects but its results and what it writes to its arguments, so it can be tried as often as necessary:
written arguments and random states are restored. A plan of unchanged operations must give the bits of the graph run
operation by operation, except where kernels sum in another order. Compiled code rounds in other places and gets a
larger tolerance (``trace.close``). Where that is not enough, the graph's own results say how much rounding matters in
it: they are computed once more, for compiled code with arguments that are rounded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.planning import Gpus, Replay, Tensor
from manyhands.errors import first_line
from manyhands.parallel.costs import Costed, costs
from manyhands.parallel.plan import Limit, why_too_large
from manyhands.parallel.way import AS_WRITTEN, TO_THE_BIT, Exactness, Way, close
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint, Peaks, one_after_the_other, peak

_TIMES = 4  # the graph's own spread that a plan's results may be off
Run = Callable[[Sequence[Tensor]], list[object]]


@dataclass(frozen=True)
class Candidate:
    """A way to run the graph: a schedule of it, or of the graph compiled."""

    way: Way
    schedule: Schedule
    trace: Trace
    threads: int = 1  # of the CPU, which the lanes share


@dataclass(frozen=True)
class Tried:
    """A candidate with the right results."""

    candidate: Candidate
    run: Run
    exactness: Exactness | None
    peaks: Peaks

    @property
    def way(self) -> Way:
        return self.candidate.way


@dataclass
class Trials:
    """What the candidates of one graph have in common, and what is learned from trying them."""

    trace: Trace
    tensors: Sequence[Tensor]
    devices: Gpus | None
    memory: float  # times the memory of plain execution that a plan may take
    reuse_outputs: bool
    measure: bool  # costs that are not known yet; otherwise they are estimated
    seconds: dict[Way, float] = field(default_factory=dict)
    predicted: dict[Way, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def costed(self) -> Costed:
        return costs(self.trace, self.devices, measure=self.measure)

    @functools.cached_property
    def measured(self) -> Graph:
        return graph(self.costed.tasks)

    @functools.cached_property
    def footprint(self) -> Footprint:
        return self.footprint_of(self.trace)

    @functools.cached_property
    def limit(self) -> Limit:
        return Limit(self.memory, planning.device_memory(self.devices) // 100)

    @functools.cached_property
    def plain_peak(self) -> int:
        tasks = self.measured.tasks
        return peak(tasks, self.footprint, one_after_the_other(range(len(tasks))))

    @functools.cached_property
    def expected(self) -> list[object]:
        """The results of the graph run operation by operation."""
        return planning.results_of(self.trace, self.tensors, planning.as_written(self.trace))

    def footprint_of(self, trace: Trace) -> Footprint:
        return Footprint(*planning.footprint(trace))

    def plainly(self, schedule: Schedule) -> Tried:
        """The graph run operation by operation, which is always a candidate."""
        candidate = Candidate(AS_WRITTEN, schedule, self.trace, planning.threads())
        return Tried(candidate, planning.as_written(self.trace), None, Peaks(self.plain_peak, self.plain_peak))

    def tried(self, candidate: Candidate, needed: int, make: Callable[[Candidate], Run]) -> Tried | None:
        """The candidate if it takes little enough memory, can be run, and is right; a note says why not."""
        way = candidate.way
        if (reason := why_too_large(way, needed, self.plain_peak, self.limit)) is not None:
            self.notes.append(reason)
            return None
        try:
            with planning.untouched(self.trace, self.tensors):
                run = make(candidate)
            results = planning.results_of(self.trace, self.tensors, run)
        except Exception as error:  # out of memory, an operation that cannot be captured
            self.notes.append(f"{way} is not used: {first_line(error)}")
            return None
        refused, exactness = self._judged(results, candidate.trace.close)
        if refused is not None:
            self.notes.append(f"{way} is not used: {refused}")
            return None
        return Tried(candidate, run, exactness, Peaks(needed, self.plain_peak))

    def _spread(self, tolerance: float) -> float:
        """How far results of the graph itself are from each other, where kernels add in any order.

        With a ``tolerance``, that of compiled code, its arguments are rounded to that precision, too.
        """
        tensors = planning.rounded(self.tensors, tolerance / 16) if tolerance else self.tensors
        again = planning.results_of(self.trace, tensors, planning.as_written(self.trace))
        return planning.equal(again, self.expected, is_compiled=tolerance > 0)[1]

    def _judged(self, results: Sequence[object], tolerance: float) -> tuple[str | None, Exactness]:
        """Why results are not right, or None; and how close they are."""
        if planning.overlapping(results) - planning.overlapping(self.expected):
            return "two of its results share memory", Exactness(False, "not comparable")
        is_compiled = tolerance > self.trace.close
        same, difference = planning.equal(results, self.expected, is_compiled=is_compiled)
        if same:
            return None, TO_THE_BIT
        if difference > tolerance:
            tolerance = max(tolerance, _TIMES * self._spread(tolerance if is_compiled else 0.0))
        return f"its results differ by {difference:.1e}" if difference > tolerance else None, close(difference)


def replaying(run: Replay) -> Run:
    """A function that replays a run; one thread at a time, if all replays use the same memory."""
    if run.concurrent:
        return run.replay
    alone = threading.Lock()

    def replay(tensors: Sequence[Tensor]) -> list[object]:
        with alone:
            return run.replay(tensors)

    return replay
