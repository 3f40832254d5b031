"""Functions that cannot be captured as one graph: when they are captured in pieces, and whether that pays.

A function may print, write files or count its calls, so it must not be called just to try it. Everything is learned
from the calls that the user makes anyway, and each of them gives the results of plain execution:

- two plain calls, timed. A function that takes less time than calling pieces would cost stays plain for good;
- calls in pieces, until nothing new is captured and every graph is planned. If no plan is faster than its unplanned
  graph, the function is called directly from then on;
- calls in pieces and plain calls in turns, timed together with the backward passes that follow. The faster is kept.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from manyhands.backends.planning import InPieces, Piece, Planner, Run, Times, Value
from manyhands.errors import first_line
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import AS_WRITTEN, IN_PIECES
from manyhands.schedule.joined import Part, joined
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import Footprint

if TYPE_CHECKING:
    from manyhands.backends.planning import AnyPlanning
    from manyhands.parallel.function import Parallel

_PLAIN_CALLS = 2  # before anything is captured: a single call does not wait for a compiler
_TOO_SHORT = 200e-6  # seconds: for shorter calls, checking the guards of pieces costs what they could gain
_UNTIL_SETTLED = 10  # calls in which something new was captured
_UNTIL_PLANNED = 4  # calls without new captures: a graph still without a plan gets none, or is unused
_TURNS = 5  # of each way
_CLEARLY = 0.97  # of plain execution's time


class Captured:
    """The pieces of one function, for all signatures of its calls."""

    def __init__(
        self,
        backend: AnyPlanning,
        function: Callable[..., Value],
        graph: Callable[[Callable[..., Value], bool], Parallel[..., Value]],
    ) -> None:
        """``graph`` makes the planner of a captured graph; True: the next call may overwrite its results."""
        self._graph = graph
        self.graphs: dict[Piece, dict[bool, Parallel[..., Value]]] = {}  # by piece, and whether it is a backward pass
        self.capture: InPieces = backend.in_pieces(function, self._make)

    def _make(self, piece: Piece, function: Callable[..., Value], is_backward: bool, reuse: bool) -> Planner:
        graph = self._graph(function, reuse)
        self.graphs.setdefault(piece, {})[is_backward] = graph
        return graph.planner()

    def plans(self, pieces: Sequence[Piece]) -> list[tuple[str, Planned]]:
        """The plans of these pieces, each with its name, forward passes first."""
        plans: list[tuple[str, Planned]] = []
        for number, piece in enumerate(pieces, 1):
            graphs = self.graphs.get(piece, {})
            for is_backward, graph in sorted(graphs.items()):
                role = ", backward" if is_backward else ", forward" if len(graphs) > 1 else ""
                if (planned := graph.plan_if_any) is not None:
                    plans.append((f"piece {number}{role} ({piece.place})", planned))
        return plans


class Pieces:
    """The calls of one signature: plain, in pieces, or still being compared."""

    def __init__(
        self, captured: Callable[[], Captured], backend: AnyPlanning, planned: Planned, *, at_once: bool
    ) -> None:
        """``planned``: the plan of the signature; ``at_once``: in pieces from the first call on, for debugging."""
        self._captured_later, self._backend, self._planned = captured, backend, planned
        self._captured: Captured | None = None
        self._plainly: Run = planned.run
        self._next: Callable[[tuple[Value, ...], dict[str, Value]], Value] = self._alone if at_once else self._timed
        self._plain: list[float] = []
        self._calls = self._quiet = 0  # in pieces, and since something new was captured
        self._turns: dict[bool, list[Times]] = {False: [], True: []}  # True: in pieces
        self._lock = threading.Lock()
        self.last: Sequence[Piece] = ()
        planned.pieces, planned.run = self, self.run

    def run(self, tensors: Sequence[Value], arguments: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
        return self._next(arguments, keywords)

    # The stages

    def _timed(self, arguments: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
        start = time.perf_counter()
        result = self._plainly((), arguments, keywords)
        self._plain.append(time.perf_counter() - start)
        if len(self._plain) >= _PLAIN_CALLS:
            if min(self._plain) < _TOO_SHORT:
                self._stay_plain(f"a call takes {min(self._plain) * 1e6:.0f} us, too short for pieces to pay")
            else:
                self._next = self._settling
        return result

    def _alone(self, arguments: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
        """One call in pieces."""
        if self._captured is None:
            try:
                self._captured = self._captured_later()
            except Exception as error:  # Dynamo does not support every version of Python
                self._stay_plain(f"it cannot be captured in pieces ({first_line(error)})")
                return self._plainly((), arguments, keywords)
            self._planned.notes.append("captured in pieces by Dynamo, which leaves to Python what it cannot trace")
        try:
            return self._captured.capture.call(arguments, keywords)
        finally:
            self.last = self._captured.capture.last_pieces()

    def _settling(self, arguments: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
        before = self._captured.capture.captured if self._captured is not None else -1
        result = self._alone(arguments, keywords)
        if self._captured is None:
            return result
        with self._lock:
            is_new = self._captured.capture.captured != before
            self._calls, self._quiet = self._calls + 1, 0 if is_new else self._quiet + 1
            graphs = [graph for piece in self.last for graph in self._captured.graphs.get(piece, {}).values()]
            if is_new and self._calls >= _UNTIL_SETTLED:
                self._stay_plain("what it depends on changes on every call, so its pieces are never reused")
            elif is_new or (self._quiet < _UNTIL_PLANNED and any(graph.plan_if_any is None for graph in graphs)):
                pass
            elif any(planned.way != AS_WRITTEN for _, planned in self._captured.plans(self.last)):
                self._next = self._comparing
            else:
                self._stay_plain("no piece has a plan that is faster than plain execution")
        return result

    def _comparing(self, arguments: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
        """Call in turns; the call after the last turn decides, when the backward pass of that turn is done, too."""
        with self._lock:
            pieces, plain = self._turns[True], self._turns[False]
            if len(plain) >= _TURNS <= len(pieces):
                self._decide()
                turn = None
            else:
                turn = len(pieces) <= len(plain)
        if turn is None:
            return self._planned.run((), arguments, keywords)
        way = self._alone if turn else lambda *call: self._plainly((), *call)
        result, times = self._backend.timed_call(lambda: way(arguments, keywords))
        self._turns[turn].append(times)
        return result

    def _decide(self) -> None:
        seconds = {turn: _typical(times) for turn, times in self._turns.items()}
        self._planned.seconds = {AS_WRITTEN: seconds[False], IN_PIECES: seconds[True]}
        if seconds[True] < _CLEARLY * seconds[False]:
            self._planned.way, self._next = IN_PIECES, self._alone
        else:
            self._stay_plain("Dynamo's guards before each piece cost more than the pieces gain")

    def _stay_plain(self, why: str) -> None:
        self._planned.run, self._planned.way = self._plainly, AS_WRITTEN
        self._planned.notes.append(f"called directly: {why}")

    # Explaining

    @property
    def how(self) -> str:
        if self._planned.run == self._plainly:
            return f"as {AS_WRITTEN}"
        if self._next == self._timed:
            return f"as {AS_WRITTEN} at first, in pieces from call {_PLAIN_CALLS + 1} on"
        count = len(self.last)
        text = (
            "in one piece" if count == 1 else f"in {count} pieces, with Python between them" if count else "by Python"
        )
        return text if self._next == self._alone else f"{text}; still being compared with {AS_WRITTEN}"

    def explained(self, explain: Callable[[str, Planned], str]) -> list[str]:
        """Lines about the breaks and the pieces; ``explain`` describes one piece."""
        if self._captured is None:
            return []
        capture = self._captured.capture
        lines = [f"  break {number}: {graph_break}" for number, graph_break in enumerate(capture.breaks, 1)]
        lines += [f"  {note}" for note in capture.notes]
        for name, planned in self._captured.plans(self.last):
            lines += [f"  {line}" for line in explain(name, planned).splitlines()]
        return lines

    def plans(self) -> list[tuple[str, Planned]]:
        return [] if self._captured is None else self._captured.plans(self.last)

    def joined(self) -> tuple[Schedule, Footprint] | None:
        """The schedules of all pieces in sequence, with the Python code between them; None if there are none."""
        parts = [
            Part(name.partition(" (")[0], planned.schedule, planned.footprint)
            for name, planned in self.plans()
            if planned.schedule is not None and planned.footprint is not None
        ]
        return joined(parts) if parts else None

    def moments(self) -> list[tuple[float, float]]:
        """When each task of the joined schedule began and ended, in runs of the pieces with substitute arguments."""
        all_moments: list[tuple[float, float]] = []
        now = 0.0
        for _, planned in self.plans():
            if planned.schedule is None or planned.footprint is None or planned.timed is None:
                continue
            if all_moments:
                all_moments.append((now, now))
            moments = planned.timed()
            all_moments += [(now + start, now + stop) for start, stop in moments]
            now = max((stop for _, stop in all_moments), default=now)
        return all_moments


def _typical(times: Sequence[Times]) -> float:
    backward = [call.backward for call in times if call.backward is not None]
    return statistics.median(call.forward for call in times) + (statistics.median(backward) if backward else 0.0)
