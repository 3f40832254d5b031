"""``parallel(fn)`` in PyTorch: ``torch.compile(fn, backend="manyhands")``, with ``explain``, ``draw`` and ``timeline``.

Dynamo captures graphs and guards them; each graph is planned (:mod:`.planner`). Calls of one form are captured until
every graph has a plan. If nothing was captured, or if the plans gain less than Dynamo's guards cost, the function is
called directly from then on. ``pure=True`` has another capture and another contract (:mod:`.pure`), and the same
planner.
"""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Sequence

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.call import is_grad_enabled, shapes_of, share_memory, why_plain
from manyhands.backends.torch.dynamo.captured import Captured, Piece
from manyhands.errors import EngineError, first_line
from manyhands.parallel import explain
from manyhands.parallel.graphs import Graphs, joined_plan
from manyhands.parallel.interface import P, ParallelFunction, R
from manyhands.parallel.plan import AS_WRITTEN, Plan
from manyhands.parallel.planner import PlanOptions
from manyhands.parallel.pure import Pure
from manyhands.tree import plain_leaves

_FORMS = 64  # kinds of calls whose times are kept
_SHARED = "two of its arguments share memory, and it writes to one, which Dynamo does not notice"
_VIRTUAL = "Dynamo captures nothing on virtual devices: write parallel(fn, pure=True)"
_UNTIL_PLANNED = 4  # calls without new captures: a graph still without a plan gets none, or is unused
_UNTIL_SETTLED = 16  # calls in all
# Seconds that guards and the wrapper of aot_autograd take, of a piece and of each of its tensors: 50 to 230 us in nets
# of docs/how/measurements.md. Not timed: whether a function is called directly would depend on the load of the machine.
_PIECE, _TENSOR = 50e-6, 0.5e-6


class Parallel(ParallelFunction[P, R]):
    """A function with the results of the plain one, faster where possible."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        pure: bool = False,
        dynamic: bool | None = None,
        reuse_outputs: bool = False,
        memory: float = 1.3,
        compile: bool = False,
        synchronous: bool = False,
    ) -> None:
        """``compile``: the graph compiled as a whole is tried too. ``dynamic``: as in ``torch.compile``.

        ``synchronous``: no lanes, no choice; the schedule's order in the caller's thread, for debugging.
        """
        super().__init__(function)
        _must_allow_memory(memory)
        self.pure, self.dynamic, self.reuse_outputs = pure, dynamic, reuse_outputs
        self.memory, self.compile, self.synchronous = memory, compile, synchronous
        self._options = PlanOptions(reuse_outputs, memory, compile, synchronous)
        name = explain.name_of(function)
        self._graphs = Graphs(self._options, name, shows_progress=True)
        self._whole = Pure(function, self._options, name) if pure else None
        self._captured: Captured | None = None
        self._forms: dict[tuple[object, ...], Calls] = {}  # of calls
        self._last_calls: Calls | None = None  # None: the last call was not captured
        self._note = ""  # why it was not

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        why = why_plain()
        if why is None and self._whole is not None:
            result = self._whole(arguments, keywords)
            self._last = self._whole.last
            return result  # type: ignore[return-value]
        if why is None and compat.count_dispatch_modes():
            why = _VIRTUAL
        if why is None and self._graphs.write and share_memory(plain_leaves((arguments, keywords))):
            why = _SHARED
        if why is None:
            form = _form(arguments, keywords)
            calls = self._forms.get(form) or self._new_form(form)
            if calls is not None:
                self._last_calls = calls
                return calls.call(arguments, keywords)  # type: ignore[return-value]
        else:
            self._note = why
        self._last_calls = None
        self._last = Plan(_as_written, notes=(self._note,))
        return self.function(*arguments, **keywords)

    def _new_form(self, form: tuple[object, ...]) -> Calls | None:
        if self._captured is None:
            try:
                self._captured = Captured(
                    self.function, self._graphs.make, dynamic=self.dynamic, to_compile=self.compile
                )
            except Exception as error:  # Dynamo does not support every version of Python
                self._note = f"it cannot be captured ({first_line(error)})"
                return None
        if len(self._forms) >= _FORMS:
            self._forms.clear()
        calls = Calls(self.function, self._captured, self._graphs, always=self.synchronous)
        return self._forms.setdefault(form, calls)

    def _stored(self) -> tuple[object, ...]:
        names = ("pure", "dynamic", "reuse_outputs", "memory", "compile", "synchronous")
        return _restore, (type(self), self.function, {name: getattr(self, name) for name in names})

    # Explaining

    @property
    def planned(self) -> Plan:
        """The plan of the last call; of a call in several pieces, their plans joined."""
        if (calls := self._last_calls) is not None:
            plans = self._graphs.plans_of(calls.pieces)
            if len(plans) == 1 and not calls.is_direct:
                return plans[0][1]
            return joined_plan(plans, Plan(_as_written, notes=self._notes(calls)))
        return super().planned

    def explain(self) -> str:
        """How the last call was run, what it took, what bounds it, and why it is not faster."""
        calls, name = self._last_calls, explain.name_of(self.function)
        if calls is None:
            return explain.explain(name, self.planned)
        plans = self._graphs.plans_of(calls.pieces)
        notes = [f"  {note}" for note in self._notes(calls)]
        if len(plans) == 1 and len(calls.pieces) == 1 and not calls.is_direct:
            return "\n".join([explain.explain(name, plans[0][1]), *notes])
        return "\n".join([f"{name}: run {_how(calls, plans)}", *notes, *_of_each(plans)])

    def _notes(self, calls: Calls) -> tuple[str, ...]:
        captured = self._captured
        assert captured is not None
        notes = [calls.why_direct] if calls.is_direct else []
        notes += [f"break {number}: {graph_break}" for number, graph_break in enumerate(captured.breaks, 1)]
        return (*notes, *captured.notes)


def _form(arguments: tuple[object, ...], keywords: dict[str, object]) -> tuple[object, ...]:
    """What similar calls probably share. It may be wrong: calls are right whichever way they go."""
    return is_grad_enabled(), shapes_of(arguments), *keywords, shapes_of(keywords.values())


def _how(calls: Calls, plans: Sequence[tuple[str, Plan]]) -> str:
    if calls.is_direct:
        return f"as {AS_WRITTEN}"
    count = len(calls.pieces)
    if count and not plans:
        return f"as {AS_WRITTEN}: its graphs have no plans yet"
    text = "in one piece" if count == 1 else f"in {count} pieces, with Python between them"
    return text if count else "by Python"


def _of_each(plans: Sequence[tuple[str, Plan]]) -> list[str]:
    return [f"  {line}" for name, plan in plans for line in explain.explain(name, plan).splitlines()]


def _restore(kind: type[Parallel[..., object]], function: Callable[..., object], settings: dict[str, object]) -> object:
    return kind(function, **settings)  # type: ignore[arg-type]


def _as_written(tensors: Sequence[object]) -> list[object]:
    raise AssertionError("the function runs as written")


def _must_allow_memory(memory: object) -> None:
    if not isinstance(memory, numbers.Real) or isinstance(memory, bool):
        raise EngineError(
            f"parallel(fn, memory={memory!r}): give a number of at least 1, how many times plain execution's memory "
            "a plan may take; 1.3 allows 30% more"
        )
    if not float(memory) >= 1:
        raise EngineError(f"memory={memory} is less than plain execution takes: give at least 1; 1.3 allows 30% more")


# Calls of one form


class Calls:
    """The calls of one form: captured, or direct."""

    def __init__(self, function: Callable[..., object], captured: Captured, graphs: Graphs, *, always: bool) -> None:
        """``always``: captured whether it gains or not, for debugging."""
        self._function, self._captured, self._graphs = function, captured, graphs
        self.call: Callable[[tuple[object, ...], dict[str, object]], object]
        self.call = self._by_graphs if always else self._call_and_settle
        self._count = self._quiet = 0
        self._lock = threading.Lock()
        self.pieces: Sequence[Piece] = ()  # of the last call
        self.why_direct = ""

    def _by_graphs(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        result, self.pieces = self._captured.call(arguments, keywords)
        return result

    def _directly(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        return self._function(*arguments, **keywords)

    def _call_and_settle(self, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
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
