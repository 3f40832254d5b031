"""What is known of a function that a framework's own runtime runs, and how it is told: text, graph, timeline.

The graph is what the framework shows; the lanes are those of its runtime (threads that run independent operations,
one queue of a GPU). Which task really ran where, the frameworks do not tell: so the timeline is simulated. Where tasks
could not be measured alone their costs are estimated from shapes, and all of them scaled so that the whole takes as
long as it was measured to take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.backends.traced import Call, Traced
from manyhands.errors import EngineError
from manyhands.parallel.equality import way
from manyhands.parallel.plan import PLAIN
from manyhands.parallel.plan_cache import Standing
from manyhands.schedule.check import check
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Lane, Schedule, schedule
from manyhands.schedule.simulate import bounds, simulate
from manyhands.schedule.timeline import Timeline


@dataclass
class Planned(Standing):
    """What is known of one signature."""

    run: Callable[[Call], Any]
    how: str = PLAIN
    schedule: Schedule | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    costs: str = ""
    advice: Sequence[str] = ()
    recognising: float | None = None  # seconds in which a call like the one that was planned is known again
    missing: str | None = None

    @property
    def name(self) -> str:
        """The way that was chosen, as it stands among those that were measured."""
        return way(self.how)

    def scheduled(self) -> Schedule:
        if self.schedule is None:
            raise EngineError(f"there is no graph: {self.how}; {'; '.join(self.notes)}")
        return self.schedule


def scheduled(traced: Traced, lanes: Callable[[str], int], seconds: float) -> Schedule:
    """The tasks on the runtime's lanes, as it would run them; ``seconds`` is what the whole was measured to take."""
    tasks = [dataclasses.replace(one, share=1 / lanes(one.device)) for one in traced.tasks]
    made = _on_lanes(graph(tasks), lanes)
    whole = simulate(made).seconds
    if traced.costs.startswith("estimated") and whole > 0:
        tasks = [dataclasses.replace(one, seconds=one.seconds * seconds / whole) for one in tasks]
        made = _on_lanes(graph(tasks), lanes)
    check(made)
    return made


def _on_lanes(made: Graph, lanes: Callable[[str], int]) -> Schedule:
    kinds = dict.fromkeys((task.device, task.kind) for task in made.tasks)
    found = [
        Lane(device, kind, number)
        for device, kind in kinds
        for number in range(lanes(device) if kind == "compute" else 1)
    ]
    return schedule(made, found)


def simulated(made: Schedule) -> Timeline:
    """When each task would run; the lanes' names say that it is in thought."""
    found = simulate(made)
    spans = [dataclasses.replace(span, lane=f"{span.lane} (simulated)") for span in found.spans]
    return dataclasses.replace(found, spans=tuple(spans))


def explain(name: str, planned: Planned, backend: Any) -> str:
    lines = [f"{name}: run as {planned.how}" + (f" ({backend.PLAINLY})" if planned.how == PLAIN else "")]
    width = max(map(len, planned.seconds), default=0)
    lines += [f"  {way:<{width}} {spent * 1e3:9.3f} ms measured" for way, spent in planned.seconds.items()]
    if planned.recognising is not None:
        lines.append(f"  to recognise a call takes {planned.recognising * 1e6:.0f} us more, whichever way is used")
    if planned.schedule is not None:
        lines += _about(planned.schedule)
        lines.append(f"  tasks' times are {planned.costs}; timeline() is simulated. {backend.LANES}")
        lines += [f"  advice: {one}" for one in planned.advice]
        if planned.missing:
            lines.append(f"  the graph is not all: {planned.missing}")
    return "\n".join([*lines, *(f"  {note}" for note in planned.notes)])


def _about(made: Schedule) -> list[str]:
    limit, lanes = bounds(made), made.per_lane()
    lines = [
        f"  {len(made.graph)} tasks, {sum(map(bool, lanes))} lanes, {made.wait_count()} waits between them",
        *(f"    {lane}: {len(own)} tasks" for lane, own in zip(made.lanes, lanes, strict=True) if own),
        f"  work {made.graph.work() * 1e3:.3f} ms; longest chain {limit.critical_path * 1e3:.3f} ms; busiest device "
        f"{limit.busiest_device * 1e3:.3f} ms",
    ]
    if limit.critical_path >= limit.busiest_device:
        return [*lines, "  bound by the longest chain: more lanes cannot help"]
    return [*lines, "  bound by the device: its work fills it, more lanes cannot help"]
