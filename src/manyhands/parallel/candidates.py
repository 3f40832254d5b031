"""The methods by which a graph could be run, each with a schedule of it; none is tried yet.

On CPUs: straight-line code on one lane, with all threads for each operation or with one, and lanes, if simulation gives
them a chance. On GPUs: CUDA graphs if the operations can be captured, streams if the host or several GPUs take part. A
CUDA graph of the operations on one lane is always among them: it is what people write by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.run.streams import Gpus, copies_or_computes_on_host, why_no_graph
from manyhands.parallel.costs import costs
from manyhands.parallel.plan import AS_WRITTEN, Executor, Method
from manyhands.parallel.trials import HANDOVER, Candidate, Trials
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule, schedule_chains, schedule_main_lane
from manyhands.schedule.simulate import simulate

_ON_CPU = (2, 3, 4, 6, 8, 12, 16)  # lanes, as far as there are threads
_ON_GPU = (2, 3, 4, 8)
_BESIDE = (1, 2, 3)
_CHAIN = 0.98  # of the work: a chain with nothing to run beside it
_LONG = 0.4  # of the work: a chain that is worth its own lane
_WAIT = 1e-6  # seconds that a wait between two lanes of a GPU costs
_Named = tuple[str, Schedule]  # a schedule and what its lanes are called


def plain(trials: Trials) -> Candidate:
    """The graph run operation by operation, which is always a candidate."""
    measured = trials.measured
    alone = trials.devices is None or len({task.device for task in measured.tasks}) == 1
    scheduled = one_lane(measured) if alone else schedule(measured, lanes_for(measured, 1))
    return Candidate(AS_WRITTEN, scheduled, trials.trace, planning.threads())


def candidates(trials: Trials) -> list[Candidate]:
    """All others that are worth trying."""
    return _on_cpu(trials, planning.threads()) if trials.devices is None else _on_gpus(trials)


def synchronous(trials: Trials) -> Candidate:
    """The order of the schedule with the most lanes in the caller's thread, for debugging."""
    _, scheduled = better(trials.measured, max(2, planning.threads()))
    return Candidate(Method(Executor.CALLERS_THREAD), scheduled, trials.trace)


def compile_whole(trials: Trials, trace: Trace) -> Candidate:
    """The graph compiled as a whole; on a GPU captured in a CUDA graph."""
    executor = Executor.THREADS if trials.devices is None else Executor.GRAPH
    scheduled = one_lane(_with_costs(trace, trials.devices))
    return Candidate(Method(executor, "whole graph", compiled=True), scheduled, trace, planning.threads())


def _with_costs(trace: Trace, devices: Gpus | None) -> Graph:
    return graph(costs(trace, devices).tasks)


def _on_cpu(trials: Trials, threads: int) -> list[Candidate]:
    measured, trace = trials.measured, trials.trace
    tried = [Candidate(Method(Executor.THREADS, "one lane"), one_lane(measured), trace, threads)]
    if threads > 1:  # dividing small operations among threads slows them down
        for method in (
            Method(Executor.AS_WRITTEN, one_thread=True),
            Method(Executor.THREADS, "one lane", one_thread=True),
        ):
            tried.append(Candidate(method, one_lane(measured), trace, 1))
    several = len({task.device for task in measured.tasks}) > 1
    counts = {*(count for count in _ON_CPU if count <= threads), threads} - {1}
    for count in sorted(counts | {1} if several else counts):
        lanes = f"{count} lanes" if count > 1 else "a lane"
        method = Method(Executor.THREADS, f"{lanes} of each device" if several else lanes)
        trials.predicted[method], scheduled = better(measured, count)
        if len(set(scheduled.lane_of)) > 1 and trials.predicted[method] < measured.work():
            tried.append(Candidate(method, scheduled, trace, threads))
        else:
            trials.notes.append(f"{method}: not tried, because the simulation shows no gain")
    return tried


def better(measured: Graph, count: int) -> tuple[float, Schedule]:
    """The schedule with every chain on one lane, which suits caches, unless dividing chains is clearly faster."""
    lanes = lanes_for(measured, count)
    whole = schedule_chains(measured, lanes, switch_seconds=HANDOVER)
    apart = schedule(measured, lanes, switch_seconds=HANDOVER)
    seconds = [simulate(scheduled, wait_seconds=HANDOVER).seconds for scheduled in (whole, apart)]
    return (seconds[0], whole) if seconds[0] <= 1.02 * seconds[1] else (seconds[1], apart)


def _on_gpus(trials: Trials) -> list[Candidate]:
    trace, measured = trials.trace, trials.measured
    tried: list[tuple[Executor, str, Schedule, Trace]] = []
    schedules = _lanes(measured)
    if (reason := why_no_graph(trace)) is None:
        tried.append((Executor.GRAPH, "one lane", one_lane(measured), trace))
        if trace.unsplit is not None:
            whole = one_lane(_with_costs(trace.unsplit, trials.devices))
            tried.append((Executor.GRAPH, "one lane, nothing split", whole, trace.unsplit))
        tried += [(Executor.GRAPH, name, scheduled, trace) for name, scheduled in _most_promising(trials, schedules)]
    else:
        trials.notes.append(reason)
    if copies_or_computes_on_host(trace) or len({task.device for task in measured.tasks}) > 1:
        by_kind = ("one lane of each kind", schedule(measured, lanes_for(measured, 1)))
        tried += [(Executor.STREAMS, name, scheduled, trace) for name, scheduled in [by_kind, *schedules[:2]]]
    made = [Candidate(Method(executor, name), scheduled, of) for executor, name, scheduled, of in tried]
    trials.predicted |= {one.method: simulate(one.schedule, wait_seconds=_WAIT).seconds for one in made}
    return made


def _most_promising(trials: Trials, schedules: Sequence[_Named]) -> Sequence[_Named]:
    """The plans with a simulated gain over one lane: capturing, comparing and timing each takes long.

    The best plan is always included, unless its tasks can only follow each other.
    """
    measured = trials.measured
    if measured.critical_path() > _CHAIN * measured.work():
        trials.notes.append("lanes are not tried: its tasks depend on each other, so nothing could overlap")
        return []
    alone = simulate(one_lane(measured), wait_seconds=_WAIT).seconds
    chosen: dict[tuple[tuple[int, ...], tuple[int, ...]], _Named] = {}
    for name, scheduled in schedules:
        if not chosen or simulate(scheduled, wait_seconds=_WAIT).seconds < alone:
            chosen.setdefault((scheduled.lane_of, scheduled.order), (name, scheduled))
    return [*chosen.values()]


def _lanes(measured: Graph) -> list[_Named]:
    """Plans for several numbers of lanes, the fastest in simulation first."""
    schedules = [
        (f"{count} lanes", schedule(measured, lanes_for(measured, count), switch_seconds=_WAIT)) for count in _ON_GPU
    ]
    if measured.critical_path() > _LONG * measured.work():
        schedules += [
            (f"{count} beside the critical path", schedule_main_lane(measured, lanes_for(measured, count + 1)))
            for count in _BESIDE
        ]
    return sorted(schedules, key=lambda pair: simulate(pair[1], wait_seconds=_WAIT).seconds)
