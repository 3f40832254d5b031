"""Whether calls of one form gain by being captured, their guards counted: otherwise the function is called directly.

Everything is learned from the calls that the user makes anyway, and each gives the function's results:

- captured calls, until every graph has a plan. If none of these is faster than its graph run operation by operation,
  or if nothing was captured, the function is called directly from then on;
- if the plans gain little, captured and plain calls in turns, timed together with the backward passes that follow. The
  faster is kept. Guards never cost what a larger gain is.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence

from manyhands.backends.torch.dynamo.captured import Captured, Times, timed_call
from manyhands.parallel.graphs import Graphs
from manyhands.parallel.plan import AS_WRITTEN

_UNTIL_PLANNED = 4  # calls without new captures: a graph still without a plan gets none, or is unused
_UNTIL_SETTLED = 16  # calls in all
_CLEAR = 200e-6  # seconds: more than guards cost
_TURNS = 5  # of each way
_CLEARLY = 0.97  # of plain execution's time
Call = tuple[tuple[object, ...], dict[str, object]]


class Calls:
    """The calls of one form: captured, still being compared, or direct."""

    def __init__(self, function: Callable[..., object], captured: Captured, graphs: Graphs, *, always: bool) -> None:
        """``always``: captured whether it gains or not, for debugging."""
        self._function, self._captured, self._graphs = function, captured, graphs
        self.call: Callable[[tuple[object, ...], dict[str, object]], object]
        self.call = self._by_graphs if always else self._settling
        self._count = self._quiet = 0
        self._turns: dict[bool, list[Times]] = {False: [], True: []}  # True: captured
        self._lock = threading.Lock()
        self.pieces: Sequence[object] = ()  # of the last call
        self.why_direct = ""
        self.seconds: dict[bool, float] = {}  # if they were compared

    def _by_graphs(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        result, self.pieces = self._captured.call(arguments, keywords)
        return result

    def _directly(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        return self._function(*arguments, **keywords)

    def _settling(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        before = self._captured.count
        result = self._by_graphs(arguments, keywords)
        with self._lock:
            self._count += 1
            self._quiet = 0 if self._captured.count != before else self._quiet + 1
            if self._graphs.are_planned(self.pieces) or self._quiet >= _UNTIL_PLANNED or self._count >= _UNTIL_SETTLED:
                self._settle()
        return result

    def _settle(self) -> None:
        plans = [plan for _, plan in self._graphs.plans_of(self.pieces)]
        gain = sum(plan.gain for plan in plans if plan.way != AS_WRITTEN)
        if not self.pieces:
            self._stay_direct("Dynamo captured nothing of it")
        elif gain <= 0:
            self._stay_direct("no plan is faster than plain execution")
        else:
            self.call = self._by_graphs if gain > _CLEAR else self._comparing

    def _comparing(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        """Call in turns; the call after the last turn decides, when the backward pass of that turn is done, too."""
        with self._lock:
            captured, plain = self._turns[True], self._turns[False]
            if decided := min(len(captured), len(plain)) >= _TURNS:
                self._decide()
            is_captured = len(captured) <= len(plain)
        if decided:
            return self.call(arguments, keywords)
        way = self._by_graphs if is_captured else self._directly
        result, times = timed_call(lambda: way(arguments, keywords))
        self._turns[is_captured].append(times)
        return result

    def _decide(self) -> None:
        self.seconds = {captured: _typical(times) for captured, times in self._turns.items()}
        if self.seconds[True] < _CLEARLY * self.seconds[False]:
            self.call = self._by_graphs
        else:
            self._stay_direct("Dynamo's guards cost more than plans gain")

    def _stay_direct(self, why: str) -> None:
        self.call, self.why_direct = self._directly, f"called directly: {why}"

    @property
    def is_direct(self) -> bool:
        return bool(self.why_direct)

    @property
    def is_compared(self) -> bool:
        """Whether captured and plain calls are still taken in turns."""
        return self.call == self._comparing


def _typical(times: Sequence[Times]) -> float:
    return statistics.median(call.forward for call in times) + statistics.median(call.backward for call in times)
