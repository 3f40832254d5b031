"""Chooses how to run a graph on GPUs: operation by operation, or on one or more lanes, as a CUDA graph or as streams.

Schedules that the simulation predicts to be fast are checked, run, compared and timed. The fastest correct one is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.planning import Gpus
from manyhands.parallel.choose.trials import Candidate, Run, Trials, Tried, replaying
from manyhands.parallel.costs import costs
from manyhands.parallel.way import AS_WRITTEN, Executor, Way
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Schedule, lanes_for, limit_memory, one_lane, schedule, schedule_main_lane
from manyhands.schedule.memory import Footprint, one_after_the_other, peak
from manyhands.schedule.simulate import simulate
from manyhands.schedule.timing import in_turns

_LANES = (2, 3, 4, 8)
_BESIDE = (1, 2, 3)
_CHAIN = 0.98  # of the work: a chain with nothing to run beside it
_LONG = 0.4  # of the work: a chain that is worth its own lane
_WAIT = 1e-6  # seconds that a wait between two lanes costs
_OF_A_TURN = 7  # calls that are timed in a turn
_NEAR = 1.1  # ratio of two plans' times below which noise may reverse their order
_SHORT = 0.05  # seconds; the host does not disturb longer calls
_CLEARLY = 0.99  # of one lane's time: lanes have to gain this much, or noise would choose them
ONE_LANE = Way(Executor.GRAPH, "one lane")
UNSPLIT = Way(Executor.GRAPH, "one lane, nothing split")
_Named = tuple[str, Schedule]  # a schedule and what its lanes are called


def plainly(trials: Trials) -> Tried:
    """The graph run operation by operation, timed."""
    measured = trials.measured
    alone = len({task.device for task in measured.tasks}) == 1
    plain = trials.plainly(one_lane(measured) if alone else schedule(measured, lanes_for(measured, 1)))
    trials.seconds[AS_WRITTEN] = _seconds(trials, plain.run)
    return plain


def choose(trials: Trials, candidates: Sequence[Candidate], best: Tried) -> Tried:
    """The fastest right one of these candidates and the best one so far, whose time is known."""
    footprints = {id(trials.trace): trials.footprint}
    for candidate in candidates:
        footprint = footprints.setdefault(id(candidate.trace), trials.footprint_of(candidate.trace))
        candidate, needed = _limited(trials, candidate, footprint)
        check(candidate.schedule)
        trials.predicted[candidate.way] = simulate(candidate.schedule, wait_seconds=_WAIT).seconds
        right = trials.tried(candidate, needed, lambda one: _gpu_run(trials, one))
        if right is not None and _is_ahead(trials, right, best):
            best = right
    return best


def _limited(trials: Trials, candidate: Candidate, footprint: Footprint) -> tuple[Candidate, int]:
    """The candidate, held back by more waits if it would take too much memory; and the memory that it takes."""
    in_graph = candidate.way.executor is Executor.GRAPH
    beside = 0  # copies of the arguments, and of results in addition to those that the caller gets
    if in_graph:
        beside = planning.copied_bytes(trials.tensors) + (0 if trials.reuse_outputs else footprint.result_bytes())
    needed = beside + _peak(candidate.trace, candidate.schedule, footprint)
    if not trials.limit.allows(needed, trials.plain_peak):
        most = trials.limit.most(trials.plain_peak) - beside
        held_back = limit_memory(
            candidate.schedule, lambda scheduled: _peak(candidate.trace, scheduled, footprint), most
        )
        candidate = Candidate(candidate.way, held_back, candidate.trace, candidate.threads)
        needed = beside + _peak(candidate.trace, held_back, footprint)
    return candidate, needed


def _gpu_run(trials: Trials, candidate: Candidate) -> Run:
    plan = planning.plan_of(candidate.schedule)
    assert trials.devices is not None
    if candidate.way.executor is not Executor.GRAPH:
        return replaying(planning.StreamRun(candidate.trace, plan, trials.devices))
    run = planning.GraphRun(candidate.trace, plan, trials.tensors, trials.devices, reuse_outputs=trials.reuse_outputs)
    return replaying(run)


def _seconds(trials: Trials, run: Run, *repeats: int) -> float:
    with planning.untouched(trials.trace, trials.tensors) as put_back:
        return planning.seconds(lambda: run(trials.tensors), trials.devices, put_back, *repeats)


def _is_ahead(trials: Trials, right: Tried, best: Tried) -> bool:
    """Whether this takes less time than the best so far; the seconds of both are kept for the report.

    The host disturbs timings by more than the difference between good plans: plans with similar times are timed in
    turns.
    """
    seconds = trials.seconds
    least = seconds[best.way]
    seconds[right.way] = spent = _seconds(trials, right.run)
    if min(spent, least) < _SHORT and max(spent, least) < _NEAR * min(spent, least):
        spent, least = in_turns(right, best, lambda one: _seconds(trials, one.run, _OF_A_TURN))
        seconds[right.way], seconds[best.way] = spent, least
    one_lane_is_best = best.way in (ONE_LANE, UNSPLIT) and right.way not in (ONE_LANE, UNSPLIT)
    return spent < (_CLEARLY * least if one_lane_is_best else least)


def _peak(trace: Trace, scheduled: Schedule, footprint: Footprint) -> int:
    """Peak memory of a plan that is issued in order and frees memory in the order of its lanes."""
    released_after = planning.release_points(trace, planning.plan_of(scheduled))
    return peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order), released_after)


def candidates(trials: Trials) -> list[Candidate]:
    """Graphs if the operations can be captured, streams if the host or several GPUs take part.

    A CUDA graph of the operations on one lane is always among them: it is what people write by hand.
    """
    trace, measured, tried = trials.trace, trials.measured, list[Candidate]()
    schedules = lanes(measured)
    if (reason := planning.why_no_graph(trace)) is None:
        tried.append(Candidate(ONE_LANE, one_lane(measured), trace))
        if trace.unsplit is not None:
            tried.append(Candidate(UNSPLIT, one_lane(_costed(trace.unsplit, trials.devices)), trace.unsplit))
        ways = [(Way(Executor.GRAPH, named), scheduled) for named, scheduled in promising(trials, schedules)]
        tried += [Candidate(way, scheduled, trace) for way, scheduled in ways]
    else:
        trials.notes.append(reason)
    if planning.copies_or_computes_on_host(trace) or len({task.device for task in measured.tasks}) > 1:
        by_kind = ("one lane of each kind", schedule(measured, lanes_for(measured, 1)))
        tried += [
            Candidate(Way(Executor.STREAMS, name), scheduled, trace) for name, scheduled in [by_kind, *schedules[:2]]
        ]
    return tried


def compiled(trials: Trials, trace: Trace) -> Candidate:
    """The graph compiled as a whole, captured in a CUDA graph."""
    return Candidate(Way(Executor.GRAPH, "whole graph", compiled=True), one_lane(_costed(trace, trials.devices)), trace)


def _costed(trace: Trace, devices: Gpus | None) -> Graph:
    return graph(costs(trace, devices).tasks)


def promising(trials: Trials, schedules: Sequence[_Named]) -> Sequence[_Named]:
    """The plans with a simulated gain over one lane: capturing, comparing and timing each takes long.

    The best plan is always included, unless its tasks can only follow each other.
    """
    measured = trials.measured
    if measured.critical_path() > _CHAIN * measured.work():
        trials.notes.append("lanes are not tried: its tasks depend on each other, so nothing could overlap")
        return []
    alone = simulate(one_lane(measured), wait_seconds=_WAIT).seconds
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    chosen: list[_Named] = []
    for name, scheduled in schedules:
        form = tuple(scheduled.lane_of), tuple(scheduled.order)
        gains = simulate(scheduled, wait_seconds=_WAIT).seconds < alone
        if form not in seen and (gains or not chosen):
            chosen.append((name, scheduled))
        seen.add(form)
    return chosen


def lanes(measured: Graph) -> list[_Named]:
    """Plans for several numbers of lanes, the fastest in simulation first."""
    schedules = [
        (f"{count} lanes", schedule(measured, lanes_for(measured, count), switch_seconds=_WAIT)) for count in _LANES
    ]
    if measured.critical_path() > _LONG * measured.work():
        schedules += [
            (f"{count} beside the critical path", schedule_main_lane(measured, lanes_for(measured, count + 1)))
            for count in _BESIDE
        ]
    return sorted(schedules, key=lambda pair: simulate(pair[1], wait_seconds=_WAIT).seconds)
