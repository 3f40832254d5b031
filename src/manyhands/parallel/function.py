"""``parallel(fn)`` in PyTorch: trace, plan, check, measure, keep the fastest; plain execution is always a candidate.

Calls with the same signature (structure, shapes, strides, dtypes, devices, modes, plain values) share a plan. The first
call of a signature traces the function, measures its operations, makes schedules for several numbers of lanes, checks
all of them, tries the promising ones and compares their results with plain execution. A plan that is not faster, or
whose results are not equal, is not used.

A function that cannot be traced as a whole is captured in pieces (:mod:`.pieces`), and each piece is planned like this.
"""

from __future__ import annotations

import functools
import logging
import numbers
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from manyhands.backends.planning import AnyPlanning, Call, GraphPlan, Planner, Replay, Run, Trace
from manyhands.errors import (
    CannotGuard,
    CannotTrace,
    ChangesOutside,
    EngineError,
    MustRunAsWritten,
    NotYet,
    first_line,
)
from manyhands.parallel import explain
from manyhands.parallel.choose import compiled as choose_compiled
from manyhands.parallel.choose import cpu as choose_cpu
from manyhands.parallel.choose import gpu as choose_gpu
from manyhands.parallel.costs import costs
from manyhands.parallel.interface import P, ParallelFunction, R
from manyhands.parallel.pieces import Captured, Pieces
from manyhands.parallel.plan import NOT_STARTED, Limit, Planned
from manyhands.parallel.plan_cache import NEVER_AGAIN, Plans
from manyhands.parallel.progress import Progress
from manyhands.parallel.side_effects import Effects
from manyhands.parallel.way import AS_WRITTEN, Executor
from manyhands.schedule.forecast import Forecast, Machine, forecast
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint
from manyhands.schedule.pictures.timeline import Timeline
from manyhands.schedule.simulate import timeline_of
from manyhands.tasks import scope

_log = logging.getLogger("manyhands")
_RECENT = 4  # plans that are checked against a call before its signature is built
_DIRECT_KEYS = 8  # kinds of calls that go directly to the function
_DIRECT_CALLS = 100  # of one kind, until plans are checked again
_GUARD_CALLS = 20  # timed to measure the cost of guards
_MEMORY = 1.3  # times plain execution's memory that a plan may take
# Tracing temporarily replaces parts of Python and of the framework: one thread at a time.
_tracing = threading.RLock()


class Parallel(ParallelFunction[P, R]):
    """A function with the results of the plain one, faster where possible."""

    compiles_whole: bool | None = None  # with ``compile``; None: if there is a GPU, whose graph then holds all of it
    shows_progress = True  # on stderr, when planning takes longer than a second
    has_guards = False  # whether the caller ensures that a plan is valid, as Dynamo does for its graphs
    compiles_regions_later = False  # with ``compile``: once enough calls make it pay off, not at the first

    def __init__(
        self,
        function: Callable[P, R],
        backend: AnyPlanning,
        *,
        reuse_outputs: bool = False,
        memory: float = _MEMORY,
        compile: bool = False,
        synchronous: bool = False,
    ) -> None:
        """``compile``: plans with compiled regions are tried too.

        ``synchronous``: no lanes, no choice; the schedule's order in the caller's thread, for debugging.
        """
        super().__init__(function)
        _must_allow_memory(memory)
        self.backend = backend
        self.reuse_outputs = reuse_outputs
        self.memory = memory
        self.compile = compile
        self.synchronous = synchronous
        self._plans: Plans[Planned] = Plans()
        self._recent: tuple[Planned, ...] = ()  # checked first against a call
        self._captured: Captured | None = None  # in pieces, if it cannot be traced as a whole
        self._direct: dict[object, list[int]] = {}  # calls that go directly to the function, and how many more may

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        if self._direct and not keywords:
            left = self._direct.get(self._quick_key(arguments))
            if left is not None and left[0] > 0:
                left[0] -= 1
                return self.function(*arguments, **keywords)
        for planned in self._recent:
            tensors = planned.fits(arguments, keywords)  # type: ignore[misc]
            if tensors is None:
                continue
            # Checking guards takes tens of microseconds: a run without side effects starts before, on the device.
            result = NOT_STARTED if planned.ahead is None else planned.ahead(tensors)
            if not planned.is_valid_for(arguments, keywords):
                planned.was_refused(started=result is not NOT_STARTED)
                continue
            self._last = planned
            planned.used = True
            if result is NOT_STARTED:
                if planned.run == self._plainly:
                    self._call_directly(planned, arguments, keywords)
                result = planned.run(tensors, arguments, keywords)
            return result  # type: ignore[return-value]
        call = self.backend.call(arguments, keywords)
        self._last = planned = self._plans.of(call.signature, arguments, keywords) or self._replan(call)
        if not planned.retry:
            # PyTorch's compiled graphs are not always right where arguments share memory and one of them is a result.
            can_be_pieces = planned.cannot_be_one and not call.shares_memory and self.backend.has_pieces()
            if can_be_pieces and planned.pieces is None:
                Pieces(self._in_pieces, self.backend, planned, at_once=self.synchronous)
            self._remember(planned, call)
        return planned.run(*call.run_arguments)  # type: ignore[return-value]

    def _quick_key(self, arguments: tuple[object, ...]) -> tuple[object, ...]:
        """A key that similar calls probably share. It may be wrong, because plain execution is always right."""
        return (self.backend.mode(), *[getattr(argument, "shape", None) for argument in arguments])

    def _call_directly(self, planned: Planned, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
        """Send calls like this one directly to the function, if no plan of it has won yet.

        Checking whether plans fit would cost time on every call and gain nothing. They are checked only now and then,
        because what the function depends on may have changed.
        """
        plans = [*self._recent, planned]
        if self.has_guards or keywords or not all(plan.run == self._plainly for plan in plans):
            self._direct.clear()
        else:
            if len(self._direct) >= _DIRECT_KEYS:
                self._direct.clear()
            self._direct[self._quick_key(arguments)] = [_DIRECT_CALLS]

    def plan_for(self, arguments: tuple[object, ...]) -> Planned:
        """The plan of a call with these arguments. Whoever runs it must ensure that later calls are alike."""
        call = self.backend.call(arguments, {})
        self._last = self._plans.of(call.signature, arguments, {}) or self._replan(call)
        return self._last

    @property
    def plan_if_any(self) -> Planned | None:
        """The plan of the last call; None before the first one."""
        return self._last

    def planner(self) -> Planner:
        """A planner for a Dynamo graph, whose guards replace the signature of later calls."""
        self.has_guards = True

        def plan(arguments: tuple[object, ...]) -> GraphPlan | None:
            before = self._last
            planned = self.plan_for(arguments)
            return self._graph_plan(planned, is_new=planned is not before)

        return plan

    def _graph_plan(self, planned: Planned, *, is_new: bool = True) -> GraphPlan | None:
        if is_new and _log.isEnabledFor(logging.DEBUG):  # the user has no object to call explain() on
            _log.debug("%s", self.explain())
        if planned.way == AS_WRITTEN and not planned.retry:
            return None
        later = None
        if planned.regions_after is not None:
            later = planned.regions_after, functools.partial(self._with_regions, planned)
        return GraphPlan(planned.run, planned.way.executor is Executor.GRAPH, not planned.retry, later)

    def _with_regions(self, planned: Planned, arguments: tuple[object, ...]) -> GraphPlan | None:
        """The better plan, after compiled regions were tried with the arguments of a later call."""
        if planned.with_regions is None:  # another graph of the same plan has tried them
            return self._graph_plan(self.plan_for(arguments))
        self._last = planned.with_regions(self.backend.call(arguments, {}))
        self._plans.replace(planned, self._last)
        return self._graph_plan(self._last)

    def _in_pieces(self) -> Captured:
        """The function captured in pieces; each graph is planned like a function."""
        if self._captured is None:

            def graph(function: Callable[..., object], reuse: bool) -> Parallel[..., object]:
                planner = Parallel(
                    function,
                    self.backend,
                    reuse_outputs=reuse,
                    memory=self.memory,
                    compile=self.compile,
                    synchronous=self.synchronous,
                )
                planner.shows_progress = False  # its name says nothing to the user
                return planner

            self._captured = Captured(self.backend, self.function, graph)
        return self._captured

    def _remember(self, planned: Planned, call: Call) -> None:
        if planned.fits is None:
            planned.fits = self.backend.recogniser(call)
        if planned.fits is not None:
            others = [other for other in self._recent if other is not planned][: _RECENT - 1]
            # Plain execution fits every state, so it comes after the plans for particular states.
            self._recent = (*others, planned) if planned.way.is_plain else (planned, *others)

    def _replan(self, call: Call) -> Planned:
        if not self._plans.is_worth_one(call.signature):
            return Planned(self._plainly, notes=[NEVER_AGAIN], retry=True)
        count = self._plans.count(call.signature)
        why = self._plans.why_no_more(call.signature)
        if why is None:
            with Progress(explain.name_of(self.function), shown=self.shows_progress) as progress:
                planned = self._plan(call, progress, first=count == 1)
            planned.planning = progress.summary()
        else:
            planned = Planned(self._plainly, notes=[why])
        if not planned.retry:
            self._plans.keep(call.signature, planned)
        return planned

    # Explaining

    def _scheduled(self) -> Schedule:
        planned = self.planned
        if planned.pieces is not None and (pieces := planned.pieces.joined()) is not None:
            planned.schedule, planned.footprint = pieces
            planned.timed = planned.pieces.moments
        return super()._scheduled()

    def measured(self) -> Timeline:
        schedule = self._scheduled()
        timed = self.planned.timed
        assert timed is not None
        try:
            moments = timed()
        except Exception as error:
            raise EngineError(
                f"it cannot be run with substitute arguments ({first_line(error)}): timeline(path, simulated=True) "
                "draws it from the costs of its tasks"
            ) from error
        return timeline_of(schedule, moments, f"measured; {self.planned.how}")

    def forecast(
        self, devices: int, *, lanes: int | None = None, bandwidth: float = 25e9, latency: float = 10e-6
    ) -> Forecast:
        schedule, planned = self._scheduled(), self.planned
        assert planned.footprint is not None
        placed = zip(schedule.lane_of, schedule.graph.tasks, strict=True)
        used = len({lane for lane, task in placed if task.kind == "compute"})
        machine = Machine(devices, max(1, used) if lanes is None else lanes, bandwidth, latency)
        return forecast(schedule.graph, planned.footprint, machine)

    # Planning

    def _plan(self, call: Call, progress: Progress, *, first: bool) -> Planned:
        """``first``: the signature's first call, which may create outside values that exist at the next."""
        progress.enters("capture")
        try:
            with _tracing, Effects(refuse=True) as effects, scope.inline_tasks():
                trace = self.backend.trace(self.function, call, to_compile=self.compile)
            if effects.seen is not None:
                raise CannotTrace(f"it {effects.seen}")
            device = self.backend.device_of(call, trace)
        except CannotTrace as error:
            planned = Planned(self._plainly, notes=[f"cannot be traced: {error}"])
            planned.holds = error.holds or planned.holds
            planned.retry = isinstance(error, NotYet) or (first and isinstance(error, ChangesOutside))
            planned.cannot_be_one = not isinstance(error, MustRunAsWritten)
            return planned
        except Exception as error:  # if it is the function's own error, plain execution raises it
            note = f"cannot be traced: {first_line(error)}"
            return Planned(self._plainly, notes=[note], retry=first, cannot_be_one=True)
        try:
            with self.backend.untouched(trace, call.tensors) as put_back:
                whole = device is not None if self.compiles_whole is None else self.compiles_whole
                postponed = self.compile and self.compiles_regions_later and whole and device is not None
                planned = self._choose(call, trace, device, progress, only_plain=postponed)
                if self.compile and not self.synchronous:
                    progress.enters("compiling")
                    trials = self._trials(call, trace, device, progress, put_back, postponed=postponed)
                    later = self.compiles_regions_later
                    planned = choose_compiled.better(planned, trials, whole=whole, later=later)
                    if planned.regions_after is not None:
                        planned.with_regions = functools.partial(self._compile_regions, planned, trace, device)
        except Exception as error:  # whatever fails while plans are tried: plain execution remains
            without_memory = self.backend.is_out_of_memory(error)
            why = "out of memory while planning" if without_memory else "it could not be planned"
            planned = Planned(self._plainly, notes=[f"{why}: {first_line(error)}"], retry=first and not without_memory)
        planned.holds, planned.changed = trace.holds, trace.changed
        if not planned.way.is_plain and not self.has_guards:
            progress.enters("guards")
            self._add_guards(planned, call, trace)
        return planned

    def _trials(
        self,
        call: Call,
        trace: Trace,
        device: object | None,
        progress: Progress,
        put_back: Callable[[], None],
        *,
        postponed: bool,
    ) -> choose_compiled.Trials[Trace, Call, object, object]:
        """The functions that plan the trace and its compiled forms, and time plans, with the arguments of a call."""
        return choose_compiled.Trials(
            self.backend,
            trace,
            lambda trace: self._choose(call, trace, device, progress, then="compiling"),
            lambda plan: self.backend.seconds(lambda: plan.run(*call.run_arguments), device, put_back),
            postponed,
        )

    def _compile_regions(self, planned: Planned, trace: Trace, device: object | None, call: Call) -> Planned:
        """The better of this plan and of the plans that are left to try."""
        planned.regions_after = planned.with_regions = None
        left = planned.uncompiled_are_left
        with Progress(explain.name_of(self.function), shown=self.shows_progress) as progress:
            progress.enters("compiling")
            try:
                with self.backend.untouched(trace, call.tensors) as put_back:
                    trials = self._trials(call, trace, device, progress, put_back, postponed=left)
                    better = choose_compiled.with_regions(planned, trials)
            except Exception as error:  # whatever fails: the plan remains
                planned.notes.append(f"compiled regions: not used: {first_line(error)}")
                better = planned
        better.holds, better.changed = trace.holds, trace.changed
        better.planning = f"{planned.planning}, and regions later in {progress.summary()}"
        return better

    def _add_guards(self, planned: Planned, call: Call, trace: Trace) -> None:
        """Let Dynamo guard what the code reads, if it can follow it; a plan has to gain more than its guards cost."""
        _, arguments, keywords = call.run_arguments
        if self._is_lost_to_guards(planned, planned.holds):  # without Dynamo's guards, which take long to build
            return
        try:
            with _tracing:
                planned.guards = self.backend.guards(self.function, arguments, keywords, trace)
        except CannotGuard as error:
            planned.notes.append(f"guarded by manyhands: Dynamo cannot trace it ({error})")
        if planned.guards is None or AS_WRITTEN not in planned.seconds:
            return
        # With ``reuse_outputs`` a run overwrites the results of the last one, which may be this call's arguments.
        can_start = planned.way.executor is Executor.GRAPH and not planned.reuse_outputs
        reads_its_tensors = self.backend.runs_ahead(trace) if can_start else None
        if reads_its_tensors is not None:
            start = planned.starts[planned.run]
            planned.ahead = lambda tensors: start(tensors) if reads_its_tensors() else NOT_STARTED
        self._is_lost_to_guards(planned, lambda: planned.is_valid_for(arguments, keywords))

    def _is_lost_to_guards(self, planned: Planned, check: Callable[[], bool]) -> bool:
        """Whether checking its guards costs more than a plan gains; then plain execution is used."""
        if AS_WRITTEN not in planned.seconds:
            return False
        cost = self.backend.seconds(check, None, lambda: None, _GUARD_CALLS)
        if planned.seconds[planned.way] + cost < planned.seconds[AS_WRITTEN]:
            return False
        planned.notes.append(
            f"{planned.way} is not used: its guards take {cost * 1e6:.0f} us per call, more than it gains"
        )
        planned.run, planned.way, planned.exactness = self._plainly, AS_WRITTEN, None
        planned.guards = planned.ahead = None
        return True

    def _choose(
        self,
        call: Call,
        trace: Trace,
        device: object | None,
        progress: Progress,
        then: str = "trials",
        *,
        only_plain: bool = False,
    ) -> Planned:
        """Plan the trace, and keep the fastest correct way.

        ``only_plain``: on a GPU, time plain execution alone, and estimate the costs of operations.
        """
        backend = self.backend
        progress.enters("costs")
        costed = costs(backend, trace, device, measure=not only_plain)
        measured = graph(costed.tasks)
        best = Planned(self._plainly, threads=backend.threads(), costed=costed, reuse_outputs=self.reuse_outputs)
        best.footprint = Footprint(*backend.footprint(trace))
        progress.enters("trials")
        limit = Limit(self.memory, backend.device_memory(device) // 100)
        replaying = functools.partial(self._replaying, best, trace)
        if self.synchronous:
            choose_cpu.synchronously(best, backend, trace, measured, replaying)
        elif device is None:
            choose_cpu.choose(best, backend, call, trace, measured, limit, replaying)
        else:
            choose_gpu.choose(best, backend, call, trace, device, measured, limit, replaying, only_plain=only_plain)
        # A reference to a run keeps the memory of its CUDA graph.
        best.starts = {run: start for run, start in best.starts.items() if run is best.run}
        best.advice = explain.advice(measured, backend.cost_keys(trace), functools.partial(backend.batch_hint, trace))

        def timed() -> Sequence[tuple[float, float]]:
            assert best.schedule is not None
            return backend.timed(best.trace or trace, backend.plan_of(best.schedule), device, best.threads)

        best.timed = timed
        progress.enters(then)
        return best

    def _replaying(self, planned: Planned, trace: Trace, run: Replay) -> Run:
        """Replay a run; a call that fails is repeated plainly, and after an out-of-memory error all calls are plain.

        Plain execution raises what the function raises, or takes the function's branch for an error.
        """
        backend = self.backend
        together = backend.together(trace)
        random = backend.random_devices(trace)
        mixing = backend.mixing(trace)
        alone = nullcontext() if run.concurrent else threading.Lock()

        def replay(tensors: Sequence[object], arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
            if mixing is not None and mixing(tensors):  # the schedule does not know about it
                return self._plainly(tensors, arguments, keywords)
            before = backend.random_state(random) if random else None
            try:
                with alone:
                    return together(run.replay(tensors))
            except Exception as error:
                if not backend.can_be_repeated(trace, error):
                    error.add_note("the plan failed after writing to your tensors, so the call cannot be repeated")
                    error.has_written = True  # type: ignore[attr-defined]
                    raise
                if without_memory := backend.is_out_of_memory(error):
                    planned.notes.append(f"{planned.how} ran out of memory: plain execution is used instead ({error})")
            # Only here has the failed run freed its memory.
            if before is not None:
                backend.set_random_state(random, before)
            if without_memory:
                planned.run, planned.way, planned.exactness = self._plainly, AS_WRITTEN, None
                planned.ahead = None
            return self._plainly(tensors, arguments, keywords)

        def start(tensors: Sequence[object]) -> object:
            if mixing is not None and mixing(tensors):
                return NOT_STARTED
            try:
                with alone:
                    return together(run.replay(tensors))
            except Exception:  # the run that follows reports why
                return NOT_STARTED

        planned.starts[replay] = start
        return replay


def _must_allow_memory(memory: object) -> None:
    if not isinstance(memory, numbers.Real) or isinstance(memory, bool):
        raise EngineError(
            f"parallel(fn, memory={memory!r}): give a number of at least 1, how many times plain execution's memory "
            "a plan may take; 1.3 allows 30% more"
        )
    if not float(memory) >= 1:
        raise EngineError(f"memory={memory} is less than plain execution takes: give at least 1; 1.3 allows 30% more")
