"""Whether calls of one form gain by being captured, their guards counted: otherwise the function is called directly.

Calls are captured until every graph has a plan. If nothing was captured, or if the plans gain less than Dynamo's guards
cost, the function is called directly from then on. Each of these calls gives the function's results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from manyhands.backends.torch.dynamo.captured import Captured, Piece
from manyhands.parallel.graphs import Graphs
from manyhands.parallel.plan import AS_WRITTEN

_UNTIL_PLANNED = 4  # calls without new captures: a graph still without a plan gets none, or is unused
_UNTIL_SETTLED = 16  # calls in all
# Seconds that guards and the wrapper of aot_autograd take, of a piece and of each of its tensors: 50 to 230 us in nets
# of docs/how/measurements.md. Not timed: whether a function is called directly would depend on the load of the machine.
_PIECE, _TENSOR = 50e-6, 0.5e-6


class Calls:
    """The calls of one form: captured, or direct."""

    def __init__(self, function: Callable[..., object], captured: Captured, graphs: Graphs, *, always: bool) -> None:
        """``always``: captured whether it gains or not, for debugging."""
        self._function, self._captured, self._graphs = function, captured, graphs
        self.call: Callable[[tuple[object, ...], dict[str, object]], object]
        self.call = self._by_graphs if always else self._settling
        self._count = self._quiet = 0
        self._lock = threading.Lock()
        self.pieces: Sequence[Piece] = ()  # of the last call
        self.why_direct = ""

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
        gain = sum(plan.gain for plan in plans if plan.method != AS_WRITTEN)
        guards = sum(_PIECE + _TENSOR * piece.tensors for piece in self.pieces)
        self.call = self._by_graphs if gain > guards else self._directly
        if not self.pieces:
            self.why_direct = "called directly: Dynamo captured nothing of it"
        elif gain <= 0:
            self.why_direct = "called directly: no plan is faster than plain execution"
        elif gain <= guards:
            costs = f"{guards * 1e6:.0f} us of Dynamo's guards"
            self.why_direct = f"called directly: its plans gain {gain * 1e6:.0f} us, less than {costs}"

    @property
    def is_direct(self) -> bool:
        return bool(self.why_direct)
