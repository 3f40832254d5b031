"""A function in pieces: Dynamo captures what it can, Python does the rest, and each graph between them is planned.

    def step(x):
        y = net(x).relu()      # piece 1
        print(y.mean().item()) # a break: Python reads the value and prints it
        return (y @ w).sum()   # piece 2

Dynamo guards each piece, and captures another one if the guards do not hold. A piece has no effects but its results:
what Python sees of it (an attribute that is set, a list that grows, an argument that is written to) happens after its
graph. Two rules keep errors the same as in plain execution:

- A function that handles errors (``try``, a ``with`` of a user's class) is left to Python, and what it calls is
  captured. In a graph, an error would bypass its handlers.
- If the first graph of a call fails, nothing has happened yet: the whole call is repeated plainly.

Code that asks whether it is compiled is left to Python, because it behaves differently then (a TransformerEncoder does
not skip padding). So are PyTorch's optimizers with all that they call: captured, they round differently.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect

import manyhands
from manyhands.backends.planning import Break, MakePlanner, Piece, Times
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import break_of, is_users, lines_of
from manyhands.backends.torch.dynamo.backend import compile_with
from manyhands.backends.torch.dynamo.backward_as_written import allow_more_backward_passes
from manyhands.errors import first_line
from manyhands.python_code.generated import function as generated

_CALL = "def call(function, arguments, keywords):\n    return function(*arguments, **keywords)"
_OPTIMIZERS = os.path.join(os.path.dirname(torch.__file__), "optim") + os.sep
_OURS = str(manyhands.__path__[0]) + os.sep
_QUESTIONS = {"is_compiling", "is_dynamo_compiling"}
_MODULES = os.path.join("torch", "nn", "modules", "module.py")  # calls modules, compiled or not, with the same results
_RESUMED = "torch_dynamo_resume_in"  # Dynamo's name of what comes after a break


class _LeftToPython(Exception):
    """Raised instead of planning a graph: its code is left to Python."""


class InPieces:
    """A user's function, captured in pieces when it is called."""

    def __init__(self, function: Callable[..., Any], make: MakePlanner) -> None:
        self.function = function
        self.breaks: list[Break] = []
        self.notes: list[str] = []
        self.captured = 0
        self._make, self._name = make, getattr(function, "__name__", type(function).__name__)
        self._local = threading.local()
        call = generated("call", _CALL, {})  # a new one: Dynamo stores what it captures with the code
        self._first = {call.__code__, getattr(_behind(function), "__code__", None)}
        self._compiled = compat.compile_in_pieces(call, self._capture, self._left_to_python, self._broken)

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        ran: list[_Captured] = []
        outer, self._local.ran = getattr(self._local, "ran", None), ran
        try:
            return self._compiled(self.function, arguments, keywords)
        except Exception as error:
            if len(ran) != 1 or not ran[0].failed_at_start(error):
                raise
        finally:
            self._local.last, self._local.ran = ran, outer
        return self.function(*arguments, **keywords)

    def last_pieces(self) -> Sequence[Piece]:
        return list(dict.fromkeys(captured.piece for captured in getattr(self._local, "last", ())))

    # Called by Dynamo

    def _left_to_python(self, code: CodeType) -> str | None:
        """Whether code is left to Python: "alone", with "all" that it calls, or not (None)."""
        if code.co_filename.startswith(_OPTIMIZERS):
            return "all"
        if code.co_filename.startswith(_OURS):
            return "alone"
        if is_users(code.co_filename) and not code.co_name.startswith(_RESUMED) and _handles_errors(code):
            self._note(f"{_named(code)} handles errors (try): Python runs it, and what it calls is planned")
            return "alone"
        return None

    def _broken(self, error: BaseException) -> None:
        graph_break = break_of(error)
        if graph_break is None:
            self._note(f"Dynamo failed, so a part runs without a plan ({first_line(error)})")
        elif graph_break not in self.breaks:
            self.breaks.append(graph_break)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _capture(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The function that Dynamo calls in place of a graph."""
        self.captured += 1
        code = compat.captured_code()
        left = next((why for why in map(_why_left_to_python, code) if why is not None), None)
        if left is not None:
            self._note(f"{lines_of(module, self._name)} {left}: Python runs it, and what it calls is planned")
            raise _LeftToPython
        captured = _Captured(Piece(lines_of(module, self._name)), bool(code) and code[0] in self._first, self._local)
        captured.statistics = _statistics(module)
        _keep_effects(module)
        captured.count = _keep_unused(module)
        # A backward pass may run it amid the user's code, where Dynamo would capture it again and again.
        captured.forward = torch.compiler.disable(module.forward)
        try:
            captured.run = compile_with(
                module,
                inputs,
                functools.partial(self._planner, captured, is_backward=False),
                functools.partial(self._planner, captured, is_backward=True),
                captured.note_writes,
            )
            if torch.is_grad_enabled() and any(_needs_gradient(value) for value in inputs):
                why = "it writes to an argument, and has gradients" if captured.writes else _why_cast_once(module)
                if why is not None:
                    self._note(f"{captured.piece.place} runs without a plan: {why}")
                    captured.run = module.forward
        except Exception as error:
            self._note(f"{captured.piece.place} runs without a plan: it cannot be planned ({first_line(error)})")
            captured.run = module.forward
        return captured.call

    def _planner(self, captured: _Captured, graph: Any, reuse: bool, *, is_backward: bool) -> Any:
        captured.draws_random_numbers |= any(
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes
        )
        return self._make(captured.piece, graph, is_backward, reuse)


def _statistics(module: GraphModule) -> frozenset[int]:
    """The arguments that are running averages or counters: results do not depend on what is written to them."""
    inputs = enumerate(module.graph.find_nodes(op="placeholder"))
    return frozenset(number for number, node in inputs if all(_is_statistic(node, user) for user in node.users))


def _is_statistic(node: Node, user: Node) -> bool:
    if user.target == "add_":
        return user.args[0] is node and not user.users
    if user.target is not torch.nn.functional.batch_norm:
        return False
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    arguments = {**dict(zip(names, user.args, strict=False)), **user.kwargs}
    places = {name for name in names if arguments.get(name) is node}
    return bool(arguments.get("training")) and places <= {"running_mean", "running_var"}


def _why_cast_once(module: GraphModule) -> str | None:
    """Autocast casts a weight once, however often it is used. Compiled, each use casts it, and its gradient is rounded
    differently.
    """
    enters = any(compat.enters_autocast(node.target) for node in module.graph.nodes)
    if not enters and not compat.is_any_autocast_enabled():
        return None
    weights = [node for node in module.graph.find_nodes(op="placeholder") if len(node.users) > 1]
    used_again = any(_needs_gradient(node.meta.get("example_value")) for node in weights)
    return "it uses a weight more than once under autocast, which casts it once" if used_again else None


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _keep_effects(module: GraphModule) -> None:
    """Mark operations without results as having an effect: PyTorch would remove them as dead code."""
    for node in module.graph.nodes:
        operation = getattr(node.target, "default", node.target)  # of torch.ops.library.name
        if isinstance(operation, compat.OpOverload) and not compat.schema(operation).returns:
            has_side_effect(operation)


def _keep_unused(module: GraphModule) -> int:
    """Return unused values as results, so that they are computed: that may draw random numbers, or raise. Gives the
    number of the other results.
    """
    output = next(node for node in module.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    unused = [
        node
        for node in module.graph.nodes
        if node.op.startswith("call_") and not node.users and isinstance(node.meta.get("example_value"), torch.Tensor)
    ]
    if unused:
        # Detached: otherwise what they are computed from would get gradients of zeros.
        with module.graph.inserting_before(output):
            output.args = ((*results, *(module.graph.call_method("detach", (node,)) for node in unused)),)
        module.recompile()
    return len(results)


class _Captured:
    """A piece as Dynamo calls it."""

    run: Callable[..., Any]
    forward: Callable[..., Any]  # the graph as Dynamo captured it
    count: int  # of the results that Dynamo knows of
    statistics: frozenset[int]  # arguments that are running averages, by number
    writes = True  # to other arguments

    def __init__(self, piece: Piece, is_first: bool, local: threading.local) -> None:
        self.piece, self._is_first, self._local = piece, is_first, local
        self.draws_random_numbers = False

    def call(self, *arguments: Any) -> Any:
        ran = getattr(self._local, "ran", None)
        if ran is not None:
            ran.append(self)
        before = _random_state() if self.draws_random_numbers else None
        versions = _versions(arguments)
        try:
            results = self.run(*arguments)
            if torch.is_grad_enabled():
                redraw = None if before is None else functools.partial(_set_random_state, before)
                allow_more_backward_passes(results, self.forward, arguments, redraw, self.statistics)
            return results[: self.count]
        except Exception as error:
            self._local.failed = error
            if before is not None:
                _set_random_state(before)
            if _versions(arguments) != versions:  # it cannot be done again
                error.has_written = True  # type: ignore[attr-defined]
                raise
            if self._is_first and ran is not None and len(ran) == 1:
                raise  # the whole function is called plainly
        # After other pieces: an error of the function itself is raised again, an error of the plan is not.
        return self.forward(*arguments)[: self.count]

    def note_writes(self, known: compat.ForwardGraph | None) -> None:
        self.writes = known is None or not known.written <= self.statistics

    def failed_at_start(self, error: BaseException) -> bool:
        """Whether this is the error of the first graph of a call, and the graph has not written to an argument."""
        failed, self._local.failed = getattr(self._local, "failed", None), None
        return self._is_first and failed is error and not getattr(error, "has_written", False)


def _behind(function: Any) -> Any:
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function if isinstance(function, FunctionType) else None


def _why_left_to_python(code: CodeType) -> str | None:
    """Why captured code would behave differently in a graph, or None."""
    if code.co_filename.startswith(_OURS):
        return "uses manyhands"
    if _QUESTIONS & set(code.co_names) and not code.co_filename.endswith(_MODULES):
        return "asks whether it is compiled"
    users = is_users(code.co_filename)
    if code.co_name == "__exit__" and (users or os.path.basename(code.co_filename) == "contextlib.py"):
        return "closes something behind itself (with)"
    if users and not code.co_name.startswith(_RESUMED) and _handles_errors(code):
        return "handles errors (try)"
    return None


@functools.lru_cache(maxsize=4096)
def _handles_errors(code: CodeType) -> bool:
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return names.count("PUSH_EXC_INFO") > names.count("WITH_EXCEPT_START")


def _named(code: CodeType) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}, {code.co_name}"


def _versions(arguments: Sequence[Any]) -> list[int]:
    """How often each tensor was written to; tensors of inference mode do not count writes."""
    return [
        compat.write_count(tensor)
        for tensor in arguments
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    ]


def _random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def in_pieces(function: Callable[..., Any], make: MakePlanner) -> InPieces:
    return InPieces(function, make)


def has_pieces() -> bool:
    """Not with active dispatch modes, which virtual devices have: Dynamo captures nothing then."""
    return not compat.count_dispatch_modes()


# Timing


def timed_call(call: Callable[[], Any]) -> tuple[Any, Times]:
    """The result of a call and its time, including work on devices.

    A backward pass through its results is timed from the moment it reaches them to its end.
    """
    times = Times()
    _finish()
    start = time.perf_counter()
    result = call()
    _finish()
    times.forward = time.perf_counter() - start
    begun: list[float] = []

    def ends() -> None:
        _finish()
        times.backward = time.perf_counter() - begun[0]

    def begins(_: torch.Tensor) -> None:
        if not begun:
            _finish()
            begun.append(time.perf_counter())
            compat.call_after_backward(ends)

    for leaf in compat.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            with contextlib.suppress(RuntimeError):
                leaf.register_hook(begins)
    return result, times


def _finish() -> None:
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)
