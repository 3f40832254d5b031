"""The trials of one graph: its candidates are run with the arguments of a call, compared with the graph, and timed.

A graph has no effects but its results and what it writes to its arguments, so it can be tried as often as necessary:
written arguments and random states are restored. A plan of unchanged operations must give the bits of the graph run
operation by operation, except where kernels sum in another order. Compiled code rounds in other places and gets a
larger tolerance (``trace.close``). Where that is not enough, the graph's own results say how much rounding matters in
it: they are computed once more, for compiled code with arguments that are rounded.

Which is faster depends on sizes, on the machine and on its load. So a candidate and the best one so far are called in
turns: a temporary load affects both. A candidate that is not clearly faster is not used.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.planning import Tensor
from manyhands.backends.torch.run.codegen import release_points
from manyhands.backends.torch.run.cuda_graph import GraphRun
from manyhands.backends.torch.run.streams import Gpus, StreamRun
from manyhands.backends.torch.run.threads import in_order
from manyhands.errors import first_line
from manyhands.parallel.costs import Costed, costs
from manyhands.parallel.plan import TO_THE_BIT, Exactness, Executor, Limit, Method, close, why_too_large
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Schedule, limit_memory
from manyhands.schedule.memory import Footprint, Peaks, one_after_the_other, peak
from manyhands.schedule.simulate import moments

HANDOVER = 20e-6  # seconds; handing a shorter task to another thread does not pay
_TIMES = 4  # the graph's own spread that a plan's results may be off
_FEWEST, _MOST = 3, 30  # turns
_BUDGET = 0.15  # seconds: then there are no more turns than the fewest
_LONG = 0.1  # seconds: for calls this long the first turn counts; there is a second one only if it gained
_BEHIND = 1.3  # times as long in both of the first two turns: there is no other
_CLEARLY = {True: 0.97, False: 0.99}  # of the time of plain execution; of another method
Run = Callable[[Sequence[Tensor]], list[object]]


@dataclass(frozen=True)
class Candidate:
    """A method and a schedule: of the graph, or of the graph compiled."""

    method: Method
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
    def method(self) -> Method:
        return self.candidate.method


@dataclass
class Trials:
    """What the candidates of one graph have in common, and what is learned from trying them."""

    trace: Trace
    tensors: Sequence[Tensor]
    devices: Gpus | None
    memory: float  # times the memory of plain execution that a plan may take
    reuse_outputs: bool
    measure: bool  # costs that are not known yet; otherwise they are estimated
    seconds: dict[Method, float] = field(default_factory=dict)
    predicted: dict[Method, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def costed(self) -> Costed:
        return costs(self.trace, self.devices, measure=self.measure)

    @functools.cached_property
    def measured(self) -> Graph:
        return graph(self.costed.tasks)

    @functools.cached_property
    def footprint(self) -> Footprint:
        return planning.footprint(self.trace)

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

    def choose(self, candidates: Sequence[Candidate], best: Tried) -> Tried:
        """The fastest right one of these candidates and the best one so far."""
        for candidate in candidates:
            candidate, memory_of = self._within_limit(candidate)
            check(candidate.schedule)
            right = self._try(candidate, memory_of)
            if right is not None and self._is_faster(right, best):
                best = right
        return best

    def without_trial(self, candidate: Candidate) -> Tried:
        """A candidate that needs no trial: the graph as it is, or what the caller demands."""
        check(candidate.schedule)
        return Tried(candidate, self._run_of(candidate), None, Peaks(self.plain_peak, self.plain_peak))

    def footprint_of(self, trace: Trace) -> Footprint:
        return self.footprint if trace is self.trace else planning.footprint(trace)

    def _within_limit(self, candidate: Candidate) -> tuple[Candidate, int]:
        """The candidate, on a GPU held back by more waits if it would take too much memory; and what it takes."""
        footprint = self.footprint_of(candidate.trace)
        beside = 0  # copies of the arguments, and of results in addition to those that the caller gets
        if candidate.method.executor is Executor.GRAPH:
            beside = planning.copied_bytes(self.tensors) + (0 if self.reuse_outputs else footprint.result_bytes())

        def memory_of(scheduled: Schedule) -> int:
            if self.devices is None:
                return beside + peak_on_threads(scheduled, footprint)
            released_after = release_points(candidate.trace, scheduled)
            return beside + peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order), released_after)

        bytes_needed = memory_of(candidate.schedule)
        if self.devices is not None and not self.limit.allows(bytes_needed, self.plain_peak):
            held_back = limit_memory(candidate.schedule, memory_of, self.limit.most(self.plain_peak))
            candidate, bytes_needed = replace(candidate, schedule=held_back), memory_of(held_back)
        return candidate, bytes_needed

    def _try(self, candidate: Candidate, memory_of: int) -> Tried | None:
        """The candidate if it takes little enough memory, can be run, and is right; a note says why not."""
        method = candidate.method
        if (reason := why_too_large(method, memory_of, self.plain_peak, self.limit)) is not None:
            self.notes.append(reason)
            return None
        try:
            with planning.restore_after(self.trace, self.tensors):
                run = self._run_of(candidate)
            results = planning.results_of(self.trace, self.tensors, run)
        except Exception as error:  # out of memory, an operation that cannot be captured
            self.notes.append(f"{method} is not used: {first_line(error)}")
            return None
        refused, exactness = self._judge(results, candidate.trace.close)
        if refused is not None:
            self.notes.append(f"{method} is not used: {refused}")
            return None
        return Tried(candidate, run, exactness, Peaks(memory_of, self.plain_peak))

    def _run_of(self, candidate: Candidate) -> Run:
        """The candidate, ready to be called."""
        method, trace, scheduled = candidate.method, candidate.trace, candidate.schedule
        if method.executor is Executor.AS_WRITTEN:
            return planning.as_written(trace, 1 if method.one_thread else None)
        if method.executor is Executor.THREADS:
            return planning.thread_run(trace, scheduled, candidate.threads).replay
        if method.executor is Executor.CALLERS_THREAD:
            return planning.thread_run(trace, in_order(scheduled), planning.threads()).replay
        assert self.devices is not None
        if method.executor is Executor.STREAMS:
            return StreamRun(trace, scheduled, self.devices).replay
        run = GraphRun(trace, scheduled, self.tensors, self.devices, reuse_outputs=self.reuse_outputs)
        return _one_at_a_time(run.replay)

    def _judge(self, results: Sequence[object], tolerance: float) -> tuple[str | None, Exactness]:
        """Why results are not right, or None; and how close they are."""
        if planning.shared_memory(results) - planning.shared_memory(self.expected):
            return "two of its results share memory", Exactness(False, "not comparable")
        is_compiled = tolerance > self.trace.close
        same, difference = planning.equal(results, self.expected, is_compiled=is_compiled)
        if same:
            return None, TO_THE_BIT
        if difference > tolerance:
            tolerance = max(tolerance, _TIMES * self._spread(tolerance if is_compiled else 0.0))
        return f"its results differ by {difference:.1e}" if difference > tolerance else None, close(difference)

    def _spread(self, tolerance: float) -> float:
        """How far results of the graph itself are from each other, where kernels add in any order.

        With a ``tolerance``, that of compiled code, its arguments are rounded to that precision, too.
        """
        tensors = planning.round_tensors(self.tensors, tolerance / 16) if tolerance else self.tensors
        again = planning.results_of(self.trace, tensors, planning.as_written(self.trace))
        return planning.equal(again, self.expected, is_compiled=tolerance > 0)[1]

    def _is_faster(self, right: Tried, best: Tried) -> bool:
        """Whether this takes clearly less time than the best so far; the seconds of both are kept for the report."""
        with planning.restore_after(self.trace, self.tensors) as put_back:

            def seconds_of(one: Tried) -> float:
                return planning.seconds(lambda: one.run(self.tensors), self.devices, put_back)

            ours, theirs = in_turns(lambda: seconds_of(right), lambda: seconds_of(best))
        self.seconds[right.method], self.seconds[best.method] = statistics.median(ours), statistics.median(theirs)
        # A load from outside that slows only the best so far is no reason to replace it: also the best times count.
        ratio = statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
        return max(ratio, min(ours) / min(theirs)) < _CLEARLY[best.method.is_plain]


def in_turns(first: Callable[[], float], second: Callable[[], float]) -> tuple[list[float], list[float]]:
    """The seconds of both in every turn, after a turn to warm up; no more turns if the first is always far behind."""
    ours, theirs = list[float](), list[float]()
    start, is_behind = time.perf_counter(), True  # in all turns so far: one turn may be disturbed
    for number in range(_MOST + 1):
        our, their = (first(), second()) if number % 2 else (second(), first())[::-1]
        is_long = min(our, their) > _LONG
        is_behind &= our > (1 if is_long else _BEHIND) * their
        if number or is_long:
            ours.append(our)
            theirs.append(their)
        enough = len(ours) >= (2 if is_long else _FEWEST) and time.perf_counter() - start > _BUDGET
        if enough or (is_behind and ours):
            break
    return ours, theirs


def peak_on_threads(scheduled: Schedule, footprint: Footprint) -> int:
    """Peak memory on threads: a memory is freed after its last user, on whichever lane that is."""
    if len(set(scheduled.lane_of)) < 2:
        return peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order))
    return peak(scheduled.graph.tasks, footprint, moments(scheduled, wait_seconds=HANDOVER))


def _one_at_a_time(run: Run) -> Run:
    """All replays of a CUDA graph use the same memory."""
    alone = threading.Lock()

    def replay(tensors: Sequence[Tensor]) -> list[object]:
        with alone:
            return run(tensors)

    return replay
