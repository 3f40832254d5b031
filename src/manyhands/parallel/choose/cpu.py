"""Chooses how to run a traced function on the CPU: as written, as straight-line code, or on several lanes.

Frameworks already use several threads for one operation; several lanes use them for several operations. Which is better
depends on sizes, on the machine and on its load, so it is measured: all candidates with the right results run in turns,
round after round, and each is compared with plain execution in the same round, so that a machine that is busy for a
while is busy for all of them. A candidate that is not clearly faster than plain execution is not used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, Replay, Run, TraceT, Value
from manyhands.errors import first_line
from manyhands.parallel.choose.equality import Judge
from manyhands.parallel.plan import Limit, Planned, why_too_large
from manyhands.parallel.way import AS_WRITTEN, Exactness, Means, Way
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule, schedule_chains
from manyhands.schedule.memory import Footprint, Peaks, one_after_the_other, peak
from manyhands.schedule.simulate import moments, simulate

HANDOVER = 20e-6  # seconds; below this it does not pay to hand a task to another thread
_CLEARLY = 0.97  # of plain execution's time
_ROUNDS = (3, 7, 30)  # at least; until the budget is spent; at most
_LONG = 0.1  # seconds of a call, from which on two rounds are enough, and the first one counts
_BEHIND = 1.3  # times plain execution's first round: no more rounds for who takes longer
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
    tried = [(Way(Means.THREADS, "one lane"), one_lane(measured), count)]
    if count > 1:
        tried.append((Way(Means.THREADS, "one lane", one_thread=True), one_lane(measured), 1))
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

    if count > 1:  # small operations lose by being divided
        alone = backend.with_threads(plainly, 1)
        add(Way(Means.AS_WRITTEN, one_thread=True), alone, best.schedule, 1, judge.results_of_function(alone))
    for way, scheduled, threads in tried:
        check(scheduled)
        if (reason := why_too_large(way, _peak(scheduled, footprint), plain, limit)) is not None:
            best.notes.append(reason)
            continue
        run = backend.thread_run(trace, backend.plan_of(scheduled), threads)
        try:
            results = judge.results_of(run)
        except Exception as error:  # a compiler's results may be of types that the next operation does not take
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
    """Of threads: a memory goes with its last user, whichever lane that is on."""
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
    """The order of the schedule with the most lanes, in the caller's thread: for debugging."""
    _, best.schedule = better(measured, max(2, backend.threads()))
    check(best.schedule)
    best.way = Way(Means.CALLERS_THREAD)
    best.run = replaying(backend.synchronous_run(trace, backend.plan_of(best.schedule)))


def candidates(measured: Graph, threads: int, best: Planned) -> list[tuple[Way, Schedule]]:
    """Schedules on 2, 3, 4, 6, 8, ... lanes, as many as there are threads, if simulation gives them a chance."""
    promising = []
    several = len({task.device for task in measured.tasks}) > 1
    counts = {*(n for n in (2, 3, 4, 6, 8, 12, 16) if n <= threads), threads} - {1}
    for count in sorted(counts | {1} if several else counts):
        lanes = f"{count} lanes" if count > 1 else "a lane"
        way = Way(Means.THREADS, f"{lanes} of each device" if several else lanes)
        predicted, scheduled = better(measured, count)
        best.predicted[way] = predicted
        if len(set(scheduled.lane_of)) > 1 and predicted < measured.work():
            promising.append((way, scheduled))
        else:
            best.notes.append(f"{way}: not tried, because the simulation shows no gain")
    return promising


def better(measured: Graph, count: int) -> tuple[float, Schedule]:
    """With every chain kept together, which caches like, unless simulation clearly prefers to divide them."""
    lanes = lanes_for(measured, count)
    whole = schedule_chains(measured, lanes, switch_seconds=HANDOVER)
    apart = schedule(measured, lanes, switch_seconds=HANDOVER)
    seconds = [simulate(scheduled, wait_seconds=HANDOVER).seconds for scheduled in (whole, apart)]
    return (seconds[0], whole) if seconds[0] <= 1.02 * seconds[1] else (seconds[1], apart)


def race(runs: Sequence[Callable[[], object]], put_back: Callable[[], None]) -> list[list[float]]:
    """Run all of them in turns; the seconds of each in every round. ``put_back`` is called before each.

    The first of them is the one to beat. Calls that take long, and have been compared already, need no warm-up, and
    those that are far behind after the first round are out: they keep the time of that.
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
        decided = running == [0]  # nobody is left to be compared with
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
    if spent < 5e-3:  # threads of the run before may still be spinning: only the second run counts
        put_back()
        begin = time.perf_counter()
        run()
        spent = time.perf_counter() - begin
    return spent


def _ratio(planned: Sequence[float], plain: Sequence[float]) -> float:
    """Of the rounds, and of the best ones, whichever is worse: a load from outside that hits only plain execution's
    threads, and may be gone in a minute, is no reason to leave it."""
    return max(statistics.median(our / its for our, its in zip(planned, plain, strict=True)), min(planned) / min(plain))
