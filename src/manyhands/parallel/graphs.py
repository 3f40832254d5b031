"""The graphs of one function that Dynamo captured: their plans, how often they ran, and what explains them.

A plan is made when a graph is first called, for the arguments of that call. It may be replaced: by what was left to try
later, or by the graph as it was captured, if memory runs out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manyhands.backends.torch.compat import tensors_in
from manyhands.backends.torch.dynamo.backend import GraphPlan, GraphRole, Planner
from manyhands.backends.torch.dynamo.graphs import CapturedGraph, trace_captured
from manyhands.backends.torch.planning import Tensor
from manyhands.errors import CannotTrace, first_line
from manyhands.parallel import explain, planner
from manyhands.parallel.plan import AS_WRITTEN, Executor, Plan
from manyhands.parallel.planner import PlanningProgress, PlanOptions
from manyhands.schedule.sequence import one_after_another

_log = logging.getLogger("manyhands")


@dataclass
class Planned:
    """A graph and its latest plan."""

    role: GraphRole
    plan: Plan | None = None  # None: it was not called yet


class Graphs:
    """All graphs of a function, or of a model under ``torch.compile``."""

    def __init__(self, options: PlanOptions, name: str, *, shows_progress: bool = False) -> None:
        self._options, self._name, self._shows_progress = options, name, shows_progress
        self.of_piece: dict[object, list[Planned]] = {}
        self.write = False  # whether one of them writes to its arguments

    def make(self, piece: object, role: GraphRole) -> Planner:
        """The planner of a graph of a piece."""
        planned = Planned(role)
        self.write |= role.writes
        self.of_piece.setdefault(piece, []).append(planned)
        return lambda graph, arguments: self._plan(planned, graph, arguments)

    def _plan(
        self, planned: Planned, graph: CapturedGraph, arguments: Sequence[object], instead_of: Plan | None = None
    ) -> GraphPlan | None:
        options = replace(self._options, reuse_outputs=self._options.reuse_outputs or planned.role.reuse)
        with PlanningProgress(self._name, shown=self._shows_progress) as progress:
            progress.enters("capture")
            try:
                trace = trace_captured(graph, arguments)
                planned.plan = planner.plan(trace, tensors_in(arguments), options, progress, instead_of)
            except Exception as error:  # also one of ours: the graph runs as it was captured
                why = str(error) if isinstance(error, CannotTrace) else first_line(error)
                planned.plan = Plan(_not_run, notes=(f"it cannot be planned: {why}",))
        if _log.isEnabledFor(logging.DEBUG):  # a user of torch.compile has no object to call explain() on
            _log.debug("%s", explain.explain(planned.role.place, planned.plan))
        return self._graph_plan(planned, planned.plan)

    def _graph_plan(self, planned: Planned, plan: Plan) -> GraphPlan | None:
        if plan.method == AS_WRITTEN:
            return None

        def fail(error: Exception) -> None:
            note = f"{plan.how} ran out of memory: plain execution is used instead ({error})"
            planned.plan = replace(plan, method=AS_WRITTEN, exactness=None, notes=(*plan.notes, note))

        def rest(graph: CapturedGraph, arguments: tuple[object, ...]) -> GraphPlan | None:
            return self._plan(planned, graph, arguments, instead_of=plan)

        later = None if plan.left_after is None else (plan.left_after, rest)
        return GraphPlan(plan.run, plan.method.executor is Executor.GRAPH, later, fail)

    def plans_of(self, pieces: Sequence[object]) -> list[tuple[str, Plan]]:
        """The plans of these pieces, each with its name, forward passes first."""
        plans: list[tuple[str, Plan]] = []
        for number, piece in enumerate(pieces, 1):
            graphs = sorted(self.of_piece.get(piece, []), key=lambda planned: planned.role.is_backward)
            for planned in graphs:
                role = ", backward" if planned.role.is_backward else ", forward" if len(graphs) > 1 else ""
                if planned.plan is not None:
                    plans.append((f"piece {number}{role} ({planned.role.place})", planned.plan))
        return plans

    def are_planned(self, pieces: Sequence[object]) -> bool:
        """Whether every graph of these pieces has a plan, be it to run as it is."""
        return all(planned.plan is not None for piece in pieces for planned in self.of_piece.get(piece, []))


def _not_run(tensors: Sequence[Tensor]) -> list[object]:
    raise AssertionError("a graph without a plan runs as it was captured")


def joined_plan(plans: Sequence[tuple[str, Plan]], how: Plan) -> Plan:
    """One plan of all pieces of a call in sequence, for pictures, timelines and forecasts; ``how`` has all else."""
    parts = [
        (name.partition(" (")[0], plan.schedule, plan.footprint)
        for name, plan in plans
        if plan.schedule is not None and plan.footprint is not None
    ]
    if not parts:
        return how
    schedule, footprint = one_after_another(parts)
    timed = [plan.timed for _, plan in plans if plan.schedule is not None and plan.timed is not None]
    return replace(how, schedule=schedule, footprint=footprint, timed=lambda: _moments(timed))


def _moments(timed: Sequence[Callable[[], Sequence[tuple[float, float]]]]) -> list[tuple[float, float]]:
    """When each task of the joined schedule began and ended, in runs of the pieces with substitute arguments."""
    all_moments: list[tuple[float, float]] = []
    now = 0.0
    for number, of_piece in enumerate(timed):
        if number:
            all_moments.append((now, now))  # the break
        all_moments += [(now + start, now + stop) for start, stop in of_piece()]
        now = max((stop for _, stop in all_moments), default=now)
    return all_moments
