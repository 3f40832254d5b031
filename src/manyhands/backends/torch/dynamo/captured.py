"""A function under ``torch.compile`` with our backend: Dynamo captures what it can, Python does the rest.

    def step(x):
        y = net(x).relu()      # piece 1
        print(y.mean().item()) # a break: Python reads the value and prints it
        return (y @ w).sum()   # piece 2

Dynamo guards each piece, and captures another one if the guards do not hold, up to its limit. An error inside Dynamo,
or of ours, leaves that part to Python, and a note says so.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch.fx import GraphModule

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import Break, break_of
from manyhands.backends.torch.dynamo.backend import GraphRole, Planner, compile_with
from manyhands.backends.torch.run.codegen import function as generated
from manyhands.errors import CannotTrace, first_line

_CALL = "def call(function, arguments, keywords):\n    return function(*arguments, **keywords)"


@dataclass(eq=False)
class Piece:
    """What is captured between two breaks: a graph, and a second one where gradients flow back through it."""

    tensors: int  # that guards look at
    run: Any = None


class Captured:
    """A user's function, captured when it is called."""

    def __init__(
        self,
        function: Callable[..., Any],
        make: Callable[[Piece, GraphRole], Planner],
        *,
        dynamic: bool | None = None,
        to_compile: bool = False,
    ) -> None:
        self.function = function
        self.breaks: list[Break] = []
        self.notes: list[str] = []
        self.count = 0  # of captures: grows where a call is not like those before
        self._make, self._to_compile = make, to_compile
        self._name = getattr(function, "__name__", type(function).__name__)
        self._local = threading.local()
        call = generated("call", _CALL, {})  # a new one: Dynamo stores what it captures with the code
        capture: Any = weakref.WeakMethod(self._capture)  # Dynamo keeps every backend, and all that it captured
        self._compiled = compat.compile_quietly(
            call, lambda *graph: capture()(*graph), dynamic, self._note_break, self._limit_reached
        )

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Sequence[Piece]]:
        """The function's result, and the pieces that the call consisted of."""
        ran: dict[Piece, None] = {}
        outer, self._local.ran = getattr(self._local, "ran", None), ran
        try:
            return self._compiled(self.function, arguments, keywords), list(ran)
        finally:
            self._local.ran = outer

    # Called by Dynamo

    def _note_break(self, error: BaseException) -> None:
        graph_break = break_of(error)
        if graph_break is None and not compat.is_graph_break(error):
            cause = getattr(error, "inner_exception", error)  # of a graph that could be captured, but not compiled
            self._note(f"a part of it runs as written, because it cannot be captured ({first_line(cause)})")
        elif graph_break is not None and graph_break not in self.breaks:
            self.breaks.append(graph_break)

    def _limit_reached(self, code: CodeType) -> None:
        place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}, {code.co_name}"
        place = self._name if code.co_filename.startswith("<manyhands") else place
        self._note(
            f"{place} reached Dynamo's limit of captures (its setting recompile_limit): other kinds of calls "
            "run as written"
        )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _capture(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The function that Dynamo calls in place of a graph."""
        self.count += 1
        piece, make, local = Piece(len(inputs)), self._make, self._local
        run = compile_with(module, inputs, lambda role: make(piece, role), to_compile=self._to_compile)
        graph = compat.forward_graph()
        if graph is not None and graph.arguments < len(inputs):  # Dynamo would use it for any others
            raise CannotTrace("two of its arguments share memory, and it writes to one")
        piece.run, kept = run, weakref.ref(piece)

        def call(*arguments: Any) -> Any:
            if (piece := kept()) is None:  # its function is gone, not the code in it that another one shares
                return module.forward(*arguments)
            if (ran := getattr(local, "ran", None)) is not None:
                ran[piece] = None
            return piece.run(*arguments)

        return call
