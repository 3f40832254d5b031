"""Chooses how to run a traced function on the CPU: as written, as straight-line code, or on several lanes.

Frameworks already use several threads for one operation; several lanes use them for several operations. Which is better
depends on sizes, on the machine and on its load, so it is measured: all candidates with the right results run in turns,
round after round, and each is compared with plain execution in the same round, so that a temporary load affects all of
them. A candidate that is not clearly faster than plain execution is not used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, Replay, Run, TraceT, Value
from manyhands.errors import first_line
from manyhands.parallel.choose.equality import Judge
from manyhands.parallel.plan import Limit, Planned, why_too_large
from manyhands.parallel.way import AS_WRITTEN, Exactness, Executor, Way
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule, schedule_chains
from manyhands.schedule.memory import Footprint, Peaks, one_after_the_other, peak
from manyhands.schedule.simulate import moments, simulate

HANDOVER = 20e-6  # seconds; handing a shorter task to another thread does not pay
_CLEARLY = 0.97  # of plain execution's time
_ROUNDS = (3, 7, 30)  # at least; until the budget is spent; at most
_LONG = 0.1  # seconds: for calls this long two rounds are enough, and the first one counts
_BEHIND = 1.3  # times plain execution's first round: slower candidates get no more rounds
_Candidate = tuple[Run, Schedule, int, Exactness | None]  # the int: threads of the CPU
_BUDGET = 0.5  # seconds for all rounds: the least number of them may take longer, the next number twice as long


def choose(
    best: Planned,
    backend: Planning[TraceT, CallT, DevicesT, PlanT],
    call: CallT,
    trace: TraceT,
    measured: Graph,
    limit: Limit,
    replaying: Callable[[Replay], Run],
) -> None:
    """Measure the candidates and put the fastest that is right into ``best``, which holds plain execution."""
    plainly = best.run
    count = backend.threads()
    footprint = best.footprint
    assert footprint is not None
    plain = peak(measured.tasks, footprint, one_after_the_other(range(len(measured))))
    tried = [(Way(Executor.THREADS, "one lane"), one_lane(measured), count)]
    if count > 1:
        tried.append((Way(Executor.THREADS, "one lane", one_thread=True), one_lane(measured), 1))
    tried += [(way, scheduled, count) for way, scheduled in candidates(measured, count, best)]
    judge = Judge.of(backend, trace, call, plainly, best.notes)
    best.schedule = one_lane(measured)
    accepted: dict[Way, _Candidate] = {AS_WRITTEN: (plainly, best.schedule, count, None)}

    def add(way: Way, run: Run, scheduled: Schedule, threads: int, results: Sequence[Value]) -> None:
        refused, exactness = judge.refused(results)
        if refused is not None:
            best.notes.append(f"{way} is not used: {refused}")
        else:
            accepted[way] = (run, scheduled, threads, exactness)

    if count > 1:  # dividing small operations among threads slows them down
        alone = backend.with_threads(plainly, 1)
        add(Way(Executor.AS_WRITTEN, one_thread=True), alone, best.schedule, 1, judge.results_of_function(alone))
    for way, scheduled, threads in tried:
        check(scheduled)
        if (reason := why_too_large(way, _peak(scheduled, footprint), plain, limit)) is not None:
            best.notes.append(reason)
            continue
        run = backend.thread_run(trace, backend.plan_of(scheduled), threads)
        try:
            results = judge.results_of(run)
        except Exception as error:  # compiled code may return dtypes that the next operation does not accept
            best.notes.append(f"{way} is not used: {first_line(error)}")
            continue
        add(way, replaying(run), scheduled, threads, results)
    with backend.untouched(trace, call.tensors) as put_back:
        times = race([lambda run=run: run(*call.run_arguments) for run, *_ in accepted.values()], put_back)  # type: ignore[misc]
    best.seconds.update(zip(accepted, map(statistics.median, times), strict=True))
    ratios = {way: _ratio(seconds, times[0]) for way, seconds in zip(accepted, times, strict=True)}
    fastest = min(ratios, key=ratios.__getitem__)
    if fastest != AS_WRITTEN and ratios[fastest] < _CLEARLY:
        best.run, best.schedule, best.threads, best.exactness = accepted[fastest]
        best.way = fastest
    best.peaks = Peaks(_peak(best.schedule, footprint), plain)


def _peak(scheduled: Schedule, footprint: Footprint) -> int:
    """Peak memory on threads: a memory is freed after its last user, on whichever lane that is."""
    if len(set(scheduled.lane_of)) < 2:
        return peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order))
    return peak(scheduled.graph.tasks, footprint, moments(scheduled, wait_seconds=HANDOVER))


def synchronously(
    best: Planned,
    backend: Planning[TraceT, CallT, DevicesT, PlanT],
    trace: TraceT,
    measured: Graph,
    replaying: Callable[[Replay], Run],
) -> None:
    """Run the order of the schedule with the most lanes in the caller's thread, for debugging."""
    _, best.schedule = better(measured, max(2, backend.threads()))
    check(best.schedule)
    best.way = Way(Executor.CALLERS_THREAD)
    best.run = replaying(backend.synchronous_run(trace, backend.plan_of(best.schedule)))


def candidates(measured: Graph, threads: int, best: Planned) -> list[tuple[Way, Schedule]]:
    """Schedules on 2, 3, 4, 6, 8, ... lanes, as many as there are threads, if simulation gives them a chance."""
    promising = []
    several = len({task.device for task in measured.tasks}) > 1
    counts = {*(n for n in (2, 3, 4, 6, 8, 12, 16) if n <= threads), threads} - {1}
    for count in sorted(counts | {1} if several else counts):
        lanes = f"{count} lanes" if count > 1 else "a lane"
        way = Way(Executor.THREADS, f"{lanes} of each device" if several else lanes)
        predicted, scheduled = better(measured, count)
        best.predicted[way] = predicted
        if len(set(scheduled.lane_of)) > 1 and predicted < measured.work():
            promising.append((way, scheduled))
        else:
            best.notes.append(f"{way}: not tried, because the simulation shows no gain")
    return promising


def better(measured: Graph, count: int) -> tuple[float, Schedule]:
    """The schedule with every chain on one lane, which suits caches, unless dividing chains is clearly faster."""
    lanes = lanes_for(measured, count)
    whole = schedule_chains(measured, lanes, switch_seconds=HANDOVER)
    apart = schedule(measured, lanes, switch_seconds=HANDOVER)
    seconds = [simulate(scheduled, wait_seconds=HANDOVER).seconds for scheduled in (whole, apart)]
    return (seconds[0], whole) if seconds[0] <= 1.02 * seconds[1] else (seconds[1], apart)


def race(runs: Sequence[Callable[[], object]], put_back: Callable[[], None]) -> list[list[float]]:
    """Run all of them in turns; returns the seconds of each in every round. ``put_back`` is called before each run.

    The first is the one to beat. Long calls that have been compared already need no warm-up. Those that are far behind
    after the first round drop out and keep the time of that round.
    """
    times: list[list[float]] = [[] for _ in runs]
    running, spent_by = list(range(len(runs))), dict[int, float]()
    least, usual, most = _ROUNDS
    start = time.perf_counter()
    for number in range(most + 1):
        turn = number % len(running)
        spent_by |= {position: _once(runs[position], put_back) for position in running[turn:] + running[:turn]}
        if not number:  # the warm-up
            running = [position for position in running if spent_by[position] < max(_LONG, _BEHIND * spent_by[0])]
            least = 1 if spent_by[0] > _LONG else least
        decided = running == [0]  # no candidate is left to compare
        for position in range(len(runs)) if number or least == 1 or decided else ():
            times[position].append(spent_by[position])
        spent = time.perf_counter() - start
        if decided or (spent > _BUDGET and (number >= usual or (number >= least and spent > 2 * _BUDGET))):
            break
    return times


def _once(run: Callable[[], object], put_back: Callable[[], None]) -> float:
    put_back()
    begin = time.perf_counter()
    run()
    spent = time.perf_counter() - begin
    if spent < 5e-3:  # threads of the previous run may still be spinning: only the second run counts
        put_back()
        begin = time.perf_counter()
        run()
        spent = time.perf_counter() - begin
    return spent


def _ratio(planned: Sequence[float], plain: Sequence[float]) -> float:
    """The worse of two ratios, that of the rounds and that of the best times: a temporary load from outside that slows
    only plain execution's threads is no reason to replace it."""
    return max(statistics.median(our / its for our, its in zip(planned, plain, strict=True)), min(planned) / min(plain))
