"""Compiled regions beside operations as they are: both are planned, and the faster of the two is kept.

A backend's ``fuse`` compiles runs of small operations, so that each is one task. That helps where operations are small,
and loses where a library's kernel is better than a compiler's, so it is measured like everything else: each of the two
is compared with plain execution in its own race, and what is further ahead of it is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.engine.planned import PLAIN, Planned
from manyhands.errors import CannotFuse

_FUSED = "fused, "


def better(planned: Planned, backend: Any, found: Any, choose: Callable[[Any], Planned]) -> Planned:
    """The better of what was planned and of a plan of the same with compiled regions; it tells of both."""
    try:
        fused = backend.fuse(found)
    except CannotFuse as error:
        planned.notes.append(f"nothing is compiled: {error}")
        return planned
    other = choose(fused)
    taken = ahead(other) < ahead(planned)
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


def ahead(planned: Planned) -> float:
    """The time of what was chosen, as a part of plain execution's in the same race."""
    if planned.name not in planned.seconds or PLAIN not in planned.seconds:
        return 1.0
    return planned.seconds[planned.name] / planned.seconds[PLAIN]


def _is_region(name: str) -> bool:
    return name.startswith("fused ")
