"""Chooses how to run a graph on the CPU: operation by operation, as straight-line code, or on several lanes.

Frameworks already use several threads for one operation; several lanes use them for several operations. Which is better
depends on sizes, on the machine and on its load, so it is measured: all candidates with the right results run in turns,
round after round, and each is compared with plain execution in the same round, so that a temporary load affects all of
them. A candidate that is not clearly faster than plain execution is not used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from manyhands.backends.torch import planning
from manyhands.parallel.choose.trials import Candidate, Run, Trials, Tried, replaying
from manyhands.parallel.way import Executor, Way
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
_BUDGET = 0.5  # seconds for all rounds: the least number of them may take longer, the next number twice as long


def choose(trials: Trials, compiled: Sequence[Candidate]) -> Tried:
    """The fastest right candidate; ``compiled`` are further ones."""
    count, measured, trace = planning.threads(), trials.measured, trials.trace
    plain = trials.plainly(one_lane(measured))
    accepted = [plain]
    tried = [Candidate(Way(Executor.THREADS, "one lane"), one_lane(measured), trace, count)]
    if count > 1:
        alone = Candidate(Way(Executor.AS_WRITTEN, one_thread=True), one_lane(measured), trace, 1)
        # Dividing small operations among threads slows them down.
        one_thread = trials.tried(alone, trials.plain_peak, lambda _: planning.with_threads(plain.run, 1))
        accepted += [one_thread] if one_thread is not None else []
        tried.append(Candidate(Way(Executor.THREADS, "one lane", one_thread=True), one_lane(measured), trace, 1))
    tried += [Candidate(way, scheduled, trace, count) for way, scheduled in candidates(trials, count)]
    for candidate in [*tried, *compiled]:
        check(candidate.schedule)
        footprint = trials.footprint if candidate.trace is trace else trials.footprint_of(candidate.trace)
        right = trials.tried(candidate, _peak(candidate.schedule, footprint), _thread_run)
        accepted += [right] if right is not None else []
    with planning.untouched(trace, trials.tensors) as put_back:
        times = race([lambda run=one.run: run(trials.tensors) for one in accepted], put_back)  # type: ignore[misc]
    trials.seconds.update({one.way: statistics.median(spent) for one, spent in zip(accepted, times, strict=True)})
    ratios = [_ratio(spent, times[0]) for spent in times]
    fastest = min(range(len(accepted)), key=ratios.__getitem__)
    return accepted[fastest] if ratios[fastest] < _CLEARLY else plain


def _thread_run(candidate: Candidate) -> Run:
    return replaying(planning.thread_run(candidate.trace, planning.plan_of(candidate.schedule), candidate.threads))


def _peak(scheduled: Schedule, footprint: Footprint) -> int:
    """Peak memory on threads: a memory is freed after its last user, on whichever lane that is."""
    if len(set(scheduled.lane_of)) < 2:
        return peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order))
    return peak(scheduled.graph.tasks, footprint, moments(scheduled, wait_seconds=HANDOVER))


def synchronously(trials: Trials) -> Tried:
    """The order of the schedule with the most lanes in the caller's thread, for debugging."""
    _, scheduled = better(trials.measured, max(2, planning.threads()))
    check(scheduled)
    candidate = Candidate(Way(Executor.CALLERS_THREAD), scheduled, trials.trace)
    run = planning.synchronous_run(trials.trace, planning.plan_of(scheduled))
    return Tried(candidate, replaying(run), None, Peaks(trials.plain_peak, trials.plain_peak))


def candidates(trials: Trials, threads: int) -> list[tuple[Way, Schedule]]:
    """Schedules on 2, 3, 4, 6, 8, ... lanes, as many as there are threads, if simulation gives them a chance."""
    measured, promising = trials.measured, []
    several = len({task.device for task in measured.tasks}) > 1
    counts = {*(n for n in (2, 3, 4, 6, 8, 12, 16) if n <= threads), threads} - {1}
    for count in sorted(counts | {1} if several else counts):
        lanes = f"{count} lanes" if count > 1 else "a lane"
        way = Way(Executor.THREADS, f"{lanes} of each device" if several else lanes)
        predicted, scheduled = better(measured, count)
        trials.predicted[way] = predicted
        if len(set(scheduled.lane_of)) > 1 and predicted < measured.work():
            promising.append((way, scheduled))
        else:
            trials.notes.append(f"{way}: not tried, because the simulation shows no gain")
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
