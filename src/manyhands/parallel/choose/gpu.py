"""Chooses how to run a traced function on GPUs: as written, or on one or more lanes, as a CUDA graph or as streams.

Schedules that the simulation predicts to be fast are checked, run, compared with plain execution and timed. The fastest
correct one is kept. Plain execution is always a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, Replay, Run, TraceT
from manyhands.errors import first_line
from manyhands.parallel.choose.equality import Judge
from manyhands.parallel.costs import costs
from manyhands.parallel.plan import Limit, Planned, why_too_large
from manyhands.parallel.way import AS_WRITTEN, Executor, Way
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule, schedule_main_lane
from manyhands.schedule.memory import Footprint, Peaks, one_after_the_other, peak
from manyhands.schedule.memory_limit import limit_memory
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


def choose(
    best: Planned,
    backend: Planning[TraceT, CallT, DevicesT, PlanT],
    call: CallT,
    trace: TraceT,
    device: DevicesT,
    measured: Graph,
    limit: Limit,
    replaying: Callable[[Replay], Run],
    *,
    only_plain: bool = False,
) -> None:
    """Try plain execution, one lane, and the plans that promise more; put the fastest correct one into ``best``.

    ``replaying`` turns a run into a callable. ``only_plain``: time plain execution, and try nothing else.
    """
    plainly, footprint = best.run, best.footprint
    assert footprint is not None
    plain = peak(measured.tasks, footprint, one_after_the_other(range(len(measured))))
    alone = len({task.device for task in measured.tasks}) == 1
    best.peaks = Peaks(plain, plain)
    best.schedule = one_lane(measured) if alone else schedule(measured, lanes_for(measured, 1))

    def seconds_of(run: Run, *repeats: int) -> float:
        with backend.untouched(trace, call.tensors) as put_back:
            return backend.seconds(lambda: run(*call.run_arguments), device, put_back, *repeats)

    best.seconds[AS_WRITTEN] = seconds_of(plainly)
    if only_plain:
        return
    judge = Judge.of(backend, trace, call, plainly, best.notes)
    footprints = {id(trace): footprint}
    for way, scheduled, traced in ways(backend, trace, device, measured, best):
        footprint = footprints.setdefault(id(traced), Footprint(*backend.footprint(traced)))
        beside = _held_by_graph(backend, call, footprint, best) if way.executor is Executor.GRAPH else 0
        needed = beside + _peak(backend, traced, scheduled, footprint)
        if not limit.allows(needed, plain):
            scheduled = limit_memory(scheduled, footprint, limit.most(plain) - beside)
            needed = beside + _peak(backend, traced, scheduled, footprint)
        check(scheduled)
        best.predicted[way] = simulate(scheduled, wait_seconds=_WAIT).seconds
        if (reason := why_too_large(way, needed, plain, limit)) is not None:
            best.notes.append(reason)
            continue
        try:
            with backend.untouched(trace, call.tensors):
                make = backend.graph_run if way.executor is Executor.GRAPH else backend.stream_run
                run = make(traced, backend.plan_of(scheduled), call.tensors, device, reuse_outputs=best.reuse_outputs)
            refused, exactness = judge.refused(judge.results_of(run))
            if refused is not None:
                best.notes.append(f"{way} is not used: {refused}")
                continue
            replay: Run = replaying(run)
            if not is_ahead(way, replay, best, seconds_of):
                continue
        except Exception as error:  # out of memory, an operation that cannot be captured: plain execution remains
            best.notes.append(f"{way} is not used: {first_line(error)}")
            continue
        best.way, best.exactness, best.peaks = way, exactness, Peaks(needed, plain)
        best.run, best.schedule, best.trace = replay, scheduled, traced


def _held_by_graph(
    backend: Planning[TraceT, CallT, DevicesT, PlanT], call: CallT, footprint: Footprint, best: Planned
) -> int:
    """Bytes of copies of the arguments, and of results in addition to those that the caller gets."""
    return backend.copied_bytes(call.tensors) + (0 if best.reuse_outputs else footprint.result_bytes())


def is_ahead(way: Way, run: Run, best: Planned, seconds_of: Callable[..., float]) -> bool:
    """Whether this takes less time than the best so far; the seconds of both are kept for the report.

    The host disturbs timings by more than the difference between good plans: plans with similar times are timed in
    turns.
    """
    least = best.seconds[best.way]
    best.seconds[way] = spent = seconds_of(run)
    if min(spent, least) < _SHORT and max(spent, least) < _NEAR * min(spent, least):
        spent, least = in_turns(run, best.run, lambda alternative: seconds_of(alternative, _OF_A_TURN))
        best.seconds[way], best.seconds[best.way] = spent, least
    one_lane_is_best = best.way in (ONE_LANE, UNSPLIT) and way not in (ONE_LANE, UNSPLIT)
    return spent < (_CLEARLY * least if one_lane_is_best else least)


def _peak(
    backend: Planning[TraceT, CallT, DevicesT, PlanT], trace: TraceT, scheduled: Schedule, footprint: Footprint
) -> int:
    """Peak memory of a plan that is issued in order and frees memory in the order of its lanes."""
    released_after = backend.release_points(trace, backend.plan_of(scheduled))
    return peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order), released_after)


def ways(
    backend: Planning[TraceT, CallT, DevicesT, PlanT],
    trace: TraceT,
    device: DevicesT,
    measured: Graph,
    best: Planned,
) -> list[tuple[Way, Schedule, TraceT]]:
    """The ways to try: graphs if they can be captured, streams if the host or several GPUs take part.

    A graph of the function's operations on one lane is always among them: it is what people write by hand.
    """
    tried: list[tuple[Way, Schedule, TraceT]] = []
    schedules = candidates(measured)
    if (reason := backend.why_no_graph(trace)) is None:
        tried.append((ONE_LANE, one_lane(measured), trace))
        if (whole := backend.unsplit(trace)) is not None:
            tried.append((UNSPLIT, one_lane(graph(costs(backend, whole, device).tasks)), whole))
        tried += [
            (Way(Executor.GRAPH, named), scheduled, trace) for named, scheduled in promising(measured, schedules, best)
        ]
    else:
        best.notes.append(reason)
    if backend.copies_or_computes_on_host(trace) or len({task.device for task in measured.tasks}) > 1:
        by_kind = schedule(measured, lanes_for(measured, 1))
        tried.append((Way(Executor.STREAMS, "one lane of each kind"), by_kind, trace))
        tried += [(Way(Executor.STREAMS, named), scheduled, trace) for named, scheduled in schedules[:2]]
    return tried


def promising(
    measured: Graph, schedules: Sequence[tuple[str, Schedule]], best: Planned
) -> Sequence[tuple[str, Schedule]]:
    """The plans with a simulated gain over one lane: capturing, comparing and timing each takes long.

    The best plan is always included, unless its tasks can only follow each other.
    """
    if measured.critical_path() > _CHAIN * measured.work():
        best.notes.append("lanes are not tried: its tasks depend on each other, so nothing could overlap")
        return []
    alone = simulate(one_lane(measured), wait_seconds=_WAIT).seconds
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    chosen: list[_Named] = []
    for lanes, scheduled in schedules:
        form = tuple(scheduled.lane_of), tuple(scheduled.order)
        gains = simulate(scheduled, wait_seconds=_WAIT).seconds < alone
        if form not in seen and (gains or not chosen):
            chosen.append((lanes, scheduled))
        seen.add(form)
    return chosen


def candidates(measured: Graph) -> list[_Named]:
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
