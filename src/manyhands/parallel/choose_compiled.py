"""Compiled regions beside operations as they are: both are planned, and the faster of the two is kept.

A backend's ``fuse`` compiles runs of small operations, so that each is one task. That helps where operations are small,
and loses where a library's kernel is better than a compiler's, so it is measured like everything else: the best of
each kind, as its own race against plain execution found it, run in turns, so that a busy moment meets both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.errors import CannotFuse
from manyhands.parallel.equality import first_line
from manyhands.parallel.plan import PLAIN, Planned
from manyhands.schedule.timing import in_turns

_FUSED = "fused, "


def better(
    planned: Planned, backend: Any, found: Any, choose: Callable[[Any], Planned], seconds_of: Callable[[Planned], float]
) -> Planned:
    """The better of what was planned and of a plan of the same with compiled regions; it tells of both.

    ``choose`` plans a trace, ``seconds_of`` gives the seconds of a call of what is planned.
    """
    try:
        fused = backend.fuse(found)
    except CannotFuse as error:
        planned.notes.append(f"nothing is compiled: {error}")
        return planned
    try:
        other = choose(fused)
    except Exception as error:
        planned.notes.append(f"compiled regions are not used: {first_line(error)}")
        return planned
    taken = other.name != PLAIN and _is_ahead(other, planned, seconds_of)
    names = {name: name if name.startswith(PLAIN) else _FUSED + name for name in other.seconds | other.predicted}
    if taken:
        other.how = names[other.name] + other.how.removeprefix(other.name)
    plain = {name: spent for name, spent in planned.seconds.items() if name.startswith(PLAIN)}
    better, worse = (other, planned) if taken else (planned, other)
    seconds = {names[name]: spent for name, spent in other.seconds.items()}
    predicted = {names[name]: spent for name, spent in other.predicted.items()}
    better.seconds = planned.seconds | seconds | ({} if taken else plain)  # plain execution's of the race that counts
    better.predicted = planned.predicted | predicted
    better.notes += [note for note in worse.notes if note not in better.notes]
    count, before = sum(_is_region(task.name) for task in fused.tasks), len(found.tasks)
    better.notes.append(f"{count} compiled regions: {len(fused.tasks)} tasks instead of {before}")
    return better


def _is_ahead(one: Planned, other: Planned, seconds_of: Callable[[Planned], float]) -> bool:
    """Whether one takes less time than the other; what was found is what is told of them."""
    one.seconds[one.name], other.seconds[other.name] = in_turns(one, other, seconds_of)
    return one.seconds[one.name] < other.seconds[other.name]


def _is_region(name: str) -> bool:
    return name.startswith("fused ")
