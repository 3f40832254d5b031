"""Decides whether compiled code is faster than uncompiled operations: both are planned, the faster plan is kept.

``fuse`` of a backend compiles runs of small operations into one task each, and lanes run these tasks side by side.
``fuse_whole`` compiles the whole function into one task: no lanes, but the compiler sees everything. Either helps where
operations are small, and loses where a library's kernel beats the compiler's. So both are measured: the best plan of
each kind is timed in turns with the best one so far, so that a moment in which the machine is busy affects both.
Compiling takes long. If the whole function is compiled and lanes have nothing to gain, because its tasks depend on each
other, runs of small operations are not compiled as well. Plans of uncompiled operations and regions can also be tried
later: once lanes could have saved, in all calls so far, as much time as compiling takes. So the first call takes little
longer than compiling the whole function once. (Not counted: a backward graph is planned again if its forward graph gets
another plan.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

from manyhands.amounts import counted
from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, TraceT
from manyhands.errors import CannotFuse, first_line
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import AS_WRITTEN, Executor, Way
from manyhands.schedule.graph import Graph
from manyhands.schedule.timing import in_turns

_WHOLE = "whole graph"
_LIBRARY_GAIN = 0.1  # of compiled code's time: what a graph of uncompiled operations may save
_TRYING = 5.0  # seconds: measuring operations, capturing and comparing a graph of them
_CLEARLY = 2  # times as fast as plain execution, at two moments: no third measurement is needed
_SIDE_BY_SIDE = 1.1  # ratio of a function's work to its longest chain from which lanes are worth compiling for


@dataclass(frozen=True)
class Trials(Generic[TraceT, CallT, DevicesT, PlanT]):
    """The functions that make and time plans of a traced function."""

    backend: Planning[TraceT, CallT, DevicesT, PlanT]
    trace: TraceT  # of the uncompiled operations
    choose: Callable[[TraceT], Planned]  # returns the best plan of a trace
    seconds_of: Callable[[Planned], float]  # of one call of a plan
    postponed: bool = False  # plans of uncompiled operations are still to be tried


def better(
    planned: Planned,
    trials: Trials[TraceT, CallT, DevicesT, PlanT],
    *,
    whole: bool = False,
    later: bool = False,
) -> Planned:
    """The best of this plan and of plans with compiled code; its report covers all of them.

    ``whole``: also compile the function as a whole. ``later``: regions and postponed plans may be left to
    :func:`with_regions`, after ``regions_after`` calls.
    """
    measured = None if planned.schedule is None else planned.schedule.graph
    can_overlap = measured is None or measured.work() > _SIDE_BY_SIDE * measured.critical_path()
    compiled, start = False, time.perf_counter()
    if whole:
        compiled, planned = _better_of(planned, trials, trials.backend.fuse_whole, _WHOLE)
    seconds = time.perf_counter() - start
    if not planned.way.compiled:  # it cannot be compiled, or plain execution is faster
        planned, trials = _with_postponed(planned, trials), replace(trials, postponed=False)
    planned.uncompiled_are_left, planned.regions_are_left = trials.postponed, can_overlap or not compiled
    if not planned.regions_are_left:
        planned.notes.append("compiled regions are not tried: tasks depend on each other, so lanes cannot help")
    if compiled and later and measured is not None and planned.way.executor is Executor.GRAPH:
        _wait_for_calls(planned, measured, seconds)
        return planned
    return with_regions(planned, trials)


def with_regions(planned: Planned, trials: Trials[TraceT, CallT, DevicesT, PlanT]) -> Planned:
    """The best of this plan and of what is left to try: plans of uncompiled operations, and with compiled regions."""
    regions_are_left = planned.regions_are_left
    planned = _with_postponed(planned, trials)
    return _better_of(planned, trials, trials.backend.fuse, "")[1] if regions_are_left else planned


def _with_postponed(planned: Planned, trials: Trials[TraceT, CallT, DevicesT, PlanT]) -> Planned:
    """The better of this plan and of plans of uncompiled operations, if these were postponed."""
    if not trials.postponed:
        return planned
    try:
        other = trials.choose(trials.trace)
    except Exception as error:
        planned.notes.append(f"uncompiled operations on lanes: not used: {first_line(error)}")
        return planned
    taken = other.way != AS_WRITTEN and _is_ahead(other, planned, trials.seconds_of)
    return _reported(planned, other, taken, other.seconds, other.predicted)


def _wait_for_calls(planned: Planned, measured: Graph, seconds: float) -> None:
    """Set the number of calls in which what is left to try could have saved as many seconds as trying it takes.

    Regions take about as long as the whole function took to compile. At best, lanes reduce the time to the longest
    chain's share of the work. Without regions only kernels of libraries can win against compiled code, by a little.
    """
    if not (planned.regions_are_left or planned.uncompiled_are_left):
        return
    if planned.regions_are_left:
        share = 1 - measured.critical_path() / measured.work()
        names = ["uncompiled operations on lanes"] * planned.uncompiled_are_left + ["compiled regions"]
    else:
        share, seconds, names = _LIBRARY_GAIN, _TRYING, ["uncompiled operations in one graph"]
    gain = planned.seconds[planned.way] * share
    planned.regions_after = math.ceil(seconds / gain)
    planned.notes.append(
        f"{' and '.join(names)} are tried after {counted(planned.regions_after, 'call')}: that takes about "
        f"{seconds:.1f} s, and would save at most {gain * 1e6:.0f} us a call"
    )


def _better_of(
    planned: Planned,
    trials: Trials[TraceT, CallT, DevicesT, PlanT],
    fuse: Callable[[TraceT], TraceT],
    lanes: str,
) -> tuple[bool, Planned]:
    """Whether the trace could be compiled, and the better plan; ``lanes`` names the lanes of the compiled one."""
    try:
        fused = fuse(trials.trace)
    except CannotFuse as error:
        planned.notes.append(f"{error}" if lanes else f"nothing is compiled: {error}")
        return False, planned
    try:
        other = trials.choose(fused)
    except Exception as error:
        planned.notes.append(f"compiled {lanes or 'regions'}: not used: {first_line(error)}")
        return False, planned
    # A way has the same name in both plans: say which of them a note is about.
    other.notes = [note if note in planned.notes else f"compiled {lanes or 'regions'}: {note}" for note in other.notes]
    taken = other.way != AS_WRITTEN and _is_ahead(other, planned, trials.seconds_of)
    compiled_ways = {way: _compiled(way, lanes) for way in other.seconds | other.predicted}
    if taken:
        other.way = compiled_ways[other.way]
    seconds = {compiled_ways[way]: spent for way, spent in other.seconds.items()}
    predicted = {compiled_ways[way]: spent for way, spent in other.predicted.items()}
    better = _reported(planned, other, taken, seconds, predicted)
    if not lanes:
        before = len(trials.trace.tasks)
        better.notes.append(
            f"{counted(fused.compiled_regions, 'compiled region')}: {counted(len(fused.tasks), 'task')} instead of "
            f"{before}"
        )
        better.notes += fused.passes
    return True, better


def _reported(
    planned: Planned, other: Planned, taken: bool, seconds: dict[Way, float], predicted: dict[Way, float]
) -> Planned:
    """The chosen plan, with the times and notes of both; ``seconds`` and ``predicted`` are the other's."""
    plain = {way: spent for way, spent in planned.seconds.items() if way.is_plain}
    better, worse = (other, planned) if taken else (planned, other)
    better.seconds = planned.seconds | seconds | ({} if taken else plain)  # plain execution's: of the decisive race
    better.predicted = planned.predicted | predicted
    better.notes += [note for note in worse.notes if note not in better.notes]
    return better


def _compiled(way: Way, lanes: str) -> Way:
    return way if way.is_plain else replace(way, compiled=True, lanes=lanes or way.lanes)


def _is_ahead(first: Planned, second: Planned, seconds_of: Callable[[Planned], float]) -> bool:
    """Whether the first takes less time than the second; stores the measured times in both."""
    if second.way == AS_WRITTEN and first.seconds.keys() >= {AS_WRITTEN, first.way}:
        plain = min(first.seconds[AS_WRITTEN], second.seconds[AS_WRITTEN])
        if plain > _CLEARLY * first.seconds[first.way]:
            return True
    first.seconds[first.way], second.seconds[second.way] = in_turns(first, second, seconds_of)
    return first.seconds[first.way] < second.seconds[second.way]
