"""Compiled regions beside operations as they are: both are planned, and the faster of the two is kept.

A backend's ``fuse`` compiles runs of small operations, so that each is one task. That helps where operations are small,
and loses where a library's kernel is better than a compiler's, so it is measured like everything else: the best of
each kind, as its own race against plain execution found it, run in turns, so that a busy moment meets both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, TraceT
from manyhands.errors import CannotFuse, first_line
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import AS_WRITTEN
from manyhands.schedule.timing import in_turns


def better(
    planned: Planned,
    backend: Planning[TraceT, CallT, DevicesT, PlanT],
    trace: TraceT,
    choose: Callable[[TraceT], Planned],
    seconds_of: Callable[[Planned], float],
) -> Planned:
    """The better of what was planned and of a plan of the same with compiled regions; it tells of both.

    ``choose`` plans a trace, ``seconds_of`` gives the seconds of a call of what is planned.
    """
    try:
        fused = backend.fuse(trace)
    except CannotFuse as error:
        planned.notes.append(f"nothing is compiled: {error}")
        return planned
    try:
        other = choose(fused)
    except Exception as error:
        planned.notes.append(f"compiled regions are not used: {first_line(error)}")
        return planned
    taken = other.way != AS_WRITTEN and _is_ahead(other, planned, seconds_of)
    ways = {way: way if way.is_plain else replace(way, compiled=True) for way in other.seconds | other.predicted}
    if taken:
        other.way = ways[other.way]
    plain = {way: spent for way, spent in planned.seconds.items() if way.is_plain}
    better, worse = (other, planned) if taken else (planned, other)
    seconds = {ways[way]: spent for way, spent in other.seconds.items()}
    predicted = {ways[way]: spent for way, spent in other.predicted.items()}
    better.seconds = planned.seconds | seconds | ({} if taken else plain)  # plain execution's of the race that counts
    better.predicted = planned.predicted | predicted
    better.notes += [note for note in worse.notes if note not in better.notes]
    count, before = sum(_is_region(task.name) for task in fused.tasks), len(trace.tasks)
    better.notes.append(f"{count} compiled regions: {len(fused.tasks)} tasks instead of {before}")
    return better


def _is_ahead(first: Planned, second: Planned, seconds_of: Callable[[Planned], float]) -> bool:
    """Whether the first takes less time than the second; both keep the times that were measured here."""
    first.seconds[first.way], second.seconds[second.way] = in_turns(first, second, seconds_of)
    return first.seconds[first.way] < second.seconds[second.way]


def _is_region(name: str) -> bool:
    return name.startswith("fused ")
