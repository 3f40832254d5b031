"""Dynamo and aot_autograd: parts that have no public name, or whose public form does too much.

Importing them takes seconds, so each function imports them when it is called.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import FrameSummary
from types import CodeType
from typing import Any, cast
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def compile_lock() -> Any:
    """Dynamo's lock, held by all that traces: two traces at once leave PyTorch's mark of one behind, in the process."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextmanager
def compiling() -> Iterator[None]:
    """As a part of Dynamo's work: other threads may call compiled functions meanwhile."""
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)  # PyTorch 2.11 has none
    with compile_lock(), session():
        yield


def skip_code(code: CodeType) -> None:
    """Let Dynamo leave a function, and what it calls, to Python; it still inlines the function in a traced caller.

    As ``torch._dynamo.eval_frame.skip_code``, without the seconds that importing it takes.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """On a CPU in simple operations: PyTorch captures its result as contiguous, and the kernel keeps the strides."""
    return gradient * (mask.type_as(gradient) * scale) if gradient.device.type == "cpu" else NotImplemented


def aot_autograd(**compilers: Any) -> Callable[..., Callable[..., Any]]:
    """Splits a graph of Dynamo into a forward and a backward graph.

    No buffers are donated to the backward graph: with them PyTorch refuses ``backward(retain_graph=True)``.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    decompositions = {torch.ops.aten.native_dropout_backward.default: _dropout_backward}
    split: Callable[..., Callable[..., Any]] = aot_autograd(**compilers, decompositions=decompositions)

    def compile_with(*arguments: Any) -> Callable[..., Any]:
        with config.patch(donated_buffer=False):
            return split(*arguments)

    return compile_with


def make_boxed_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The calling convention of what aot_autograd's compilers return."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return cast(Callable[..., Any], make_boxed_func(function))


@dataclass(frozen=True)
class ForwardGraph:
    """What aot_autograd knows about the forward graph that it compiles."""

    fixed: frozenset[int]  # arguments that are parameters and buffers: their addresses stay
    written_back: int  # the first results, which PyTorch copies into arguments (others the graph writes itself)
    results: int  # these and the caller's; results after them are saved for the backward pass
    arguments: int  # PyTorch makes one of several that share memory, if one of these is written to
    writes: bool  # to an argument, be it itself or by PyTorch


def forward_graph() -> ForwardGraph | None:
    """The facts about the graph that is being compiled; None if PyTorch does not know them."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    if known is None:
        return None
    known.bw_donated_idxs = []  # no donated buffers: a graph may be retained (see aot_autograd)
    changed = [known.input_info[number] for number in known.mutated_inp_runtime_indices]
    copied = all(
        argument.mutates_data and not argument.mutates_metadata and not argument.mutates_storage_metadata
        for argument in changed
    )
    written_back = len(changed) if copied else 0
    writes = any(argument.mutates_data for argument in known.input_info)
    fixed = frozenset(known.static_input_indices)
    return ForwardGraph(fixed, written_back, known.num_forward, len(known.input_info), writes)


@contextmanager
def replace(*others: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of Dynamo for a while; a name that this PyTorch does not have is skipped.

    The caller holds Dynamo's ``compile_lock``.
    """
    with ExitStack() as stack:
        for owner, name, other in others:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, other))
        yield


def without_known_faults() -> AbstractContextManager[None]:
    """Work around faults of Dynamo while it captures.

    PyTorch 2.12 and 2.13 attach a source to the constants None, True and False that all captures share, for
    ``weight.grad`` after ``zero_grad()``. Every later capture in the process, of any function, may then read its None
    from there, and fail (https://github.com/pytorch/pytorch/pull/194749).

    The number that a ``random.Random`` of the user draws becomes a constant of the graph: every call would get the
    same one (PyTorch 2.11 to 2.13). So Dynamo must not know that class, and leaves it to Python.

    Weights of an optimizer that was captured become attributes of later graphs, and a ``backward()`` in such a
    graph does not find them: they silently get no gradient. So they stay inputs, at fixed addresses.
    """
    from torch._dynamo.variables import TensorVariable, builder, constant, misc

    kind: Any = TensorVariable
    names = ("CONSTANT_VARIABLE_NONE", "CONSTANT_VARIABLE_TRUE", "CONSTANT_VARIABLE_FALSE")
    shared: list[Any] = [getattr(constant, name) for name in names if hasattr(constant, name)]
    getting = kind.var_getattr

    def var_getattr(tensor: Any, translator: Any, name: str) -> Any:
        result = getting(tensor, translator, name)
        if result.source is not None and any(result is constant_variable for constant_variable in shared):
            marked = result.clone()
            result.source = None
            return marked
        return result

    for constant_variable in shared:
        constant_variable.source = None  # an earlier capture may have left one
    unknown = staticmethod(lambda generator: False)
    random_object: Any = getattr(misc, "RandomVariable", None)
    kind_of_address: Any = getattr(builder, "get_static_address_type", None)

    def get_static_address_type(tensor: torch.Tensor) -> str | None:
        return "unguarded" if kind_of_address(tensor) is not None else None

    return replace(
        (kind, "var_getattr", var_getattr),
        (random_object, "is_supported_random_obj", unknown),
        (builder, "get_static_address_type", get_static_address_type),
    )


def with_whole_steps() -> AbstractContextManager[None]:
    """Let Dynamo capture a training step up to its optimizer's in one graph, where it would break it.

    A loss that outlives its backward pass ends a graph, because it can be differentiated only once: it is marked, and
    leaves the graph without a gradient function (:func:`facts_of_step`). ``optimizer.zero_grad()`` is traced. For the
    update, which is not, Dynamo would set an optimizer's option ``capturable``.
    """
    from torch._dynamo import output_graph
    from torch._dynamo.variables import functions, optimizer

    owner: Any = output_graph.OutputGraph
    validate = getattr(owner, "_validate_outputs_safe_for_autograd_nodes", lambda *_: None)
    optimizers: Any = optimizer.OptimizerVariable
    getting = optimizers.var_getattr

    def mark(graph: Any, outputs: Any, translator: Any) -> None:
        left = []
        for output in outputs:
            needed = graph.autograd_grad_consumed_grad_fns and getattr(output, "requires_grad", False)
            value = output.as_proxy().node.meta.get("example_value") if needed else None
            if isinstance(value, torch.Tensor) and is_spent(value):
                output.as_proxy().node.meta[_SPENT] = True
            else:
                left.append(output)
        cleared = {id(parameter) for parameter in getattr(graph, _CLEARED, ())}
        for node in graph.graph.nodes:
            if cleared and id(getattr(node.meta.get("grapharg"), "example", None)) in cleared:
                node.meta[_CLEARED] = True
        validate(graph, left, translator)

    class ZeroGrad(functions.UserMethodVariable):
        def call_function(self, translator: Any, arguments: Any, keywords: Any) -> Any:
            if arguments or keywords:
                return getting(self.obj, translator, "zero_grad").call_function(translator, arguments, keywords)
            optimizer = self.obj.value  # type: ignore[attr-defined]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            setattr(translator.output, _CLEARED, [*getattr(translator.output, _CLEARED, ()), *parameters])
            return super().call_function(translator, arguments, keywords)

    def var_getattr(variable: Any, translator: Any, name: str) -> Any:
        value = variable.value
        if name == "zero_grad" and type(value).zero_grad is torch.optim.Optimizer.zero_grad and name not in vars(value):
            return ZeroGrad(_zero_grad, variable)
        return getting(variable, translator, name)

    return replace(
        (owner, "_validate_outputs_safe_for_autograd_nodes", mark),
        (optimizers, "var_getattr", var_getattr),
        (optimizers, "_set_capturable", lambda *_: None),
    )


_SPENT, _CLEARED = "manyhands_spent", "manyhands_cleared"


def _zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """As the optimizer's own method, which PyTorch hides from Dynamo."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def is_spent(tensor: torch.Tensor) -> bool:
    """Whether a second backward pass would be an error: it needs a tensor that the first one has freed."""
    left, seen = [tensor.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError:
                    return True
        left += [following for following, _ in node.next_functions]
    return False


def facts_of_step(graph: torch.fx.Graph) -> tuple[list[int], list[int]]:
    """Which results of a captured graph cannot be differentiated again, and which arguments lose their gradients."""
    nodes = list(graph.nodes)
    results: Any = nodes[-1].args[0]
    spent = [number for number, node in enumerate(results) if getattr(node, "meta", {}).get(_SPENT)]
    arguments = [node for node in nodes if node.op == "placeholder"]
    return spent, [number for number, node in enumerate(arguments) if node.meta.get(_CLEARED)]


def spent_loss(tensor: torch.Tensor) -> torch.Tensor:
    """A loss after its backward pass: it still has a gradient function, whose second use is an error."""
    left: Any = tensor.detach()
    left.requires_grad = True
    with torch.enable_grad():
        error: Any = torch._C._functions.DelayedError(_TWICE, 1)
        return cast(torch.Tensor, error(left))


_TWICE = (
    "Trying to backward through the graph a second time (its backward pass is part of a captured graph). Specify "
    "retain_graph=True if you need to backward through the graph a second time"
)

# While Dynamo captures for ``parallel``. What it would do differently from Python (NumPy's functions by PyTorch's, a
# failed ``assert`` as another error) is left to Python. A backward pass becomes part of its graph.
_SETTINGS = {
    "suppress_errors": False,
    "fail_on_recompile_limit_hit": False,
    "trace_numpy": False,
    "rewrite_assert_with_torch_assert": False,
    "skip_nnmodule_hook_guards": False,
    "trace_autograd_ops": True,
}
_ATTEMPTS = 2  # to capture code, after which it is left to Python

# Loggers for users of torch.compile.
_TALKATIVE = ("torch", "torch._dynamo", "torch._functorch", "torch._guards", "torch._inductor", "torch._logging")


class _Frames:
    """Wraps Dynamo's callback for code that is called for the first time: sets our settings, and catches errors."""

    def __init__(self, convert: Any, report: Callable[[BaseException], None], left: Callable[[CodeType], None]) -> None:
        self._torchdynamo_orig_backend = self._convert = convert  # Dynamo looks for the backend by this name
        self._report, self._limit_reached = report, left
        self._attempts: Counter[CodeType] = Counter()

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.types import ConvertFrameReturn

        code = frame.f_code
        if os.path.dirname(code.co_filename) == os.path.dirname(torch.optim.__file__):
            # An update runs as PyTorch wrote it, in a few kernels for all weights: guards of each weight's state take
            # longer than a graph could save.
            frames = torch._C._dynamo.eval_frame
            with_its_calls = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            return ConvertFrameReturn(frame_exec_strategy=with_its_calls, apply_to_code=False)
        if self._attempts[code] < _ATTEMPTS:
            settings = {name: value for name, value in _SETTINGS.items() if hasattr(config, name)}
            try:
                patch = config.patch(settings)
                with compile_lock(), patch, _quiet(), without_known_faults(), with_whole_steps(), self._listen():
                    result = self._convert(frame, *arguments)
                skipped = str(getattr(result, "skip_reason", ""))  # PyTorch 2.11 does not say why
                if result.guarded_code is not None or "skipfiles" in skipped:
                    return result
                if result.frame_exec_strategy.cur_action == torch._C._dynamo.eval_frame._FrameAction.RUN_ONLY:
                    self._limit_reached(code)
                self._attempts[code] = _ATTEMPTS
            except Exception as error:
                self._report(error)
                self._attempts[code] += 1
        # Not for the code in general: another backend may compile it.
        return ConvertFrameReturn(apply_to_code=False)

    def _listen(self) -> AbstractContextManager[None]:
        """Report each place where Dynamo leaves a function to Python."""
        from torch._dynamo import symbolic_convert

        owner: Any = symbolic_convert.InstructionTranslatorBase
        before: Any = getattr(owner, "log_graph_break", None)

        def log_graph_break(translator: Any, code_options: Any, reason: str, exc: BaseException) -> None:
            if not getattr(exc, "logged", False):
                self._report(exc)
            before(translator, code_options, reason, exc)

        return replace((owner, "log_graph_break", log_graph_break))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that are meant for users of torch.compile, except what TORCH_LOGS asks for."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger, level in zip(loggers, levels, strict=True):
        if level >= logging.WARNING or level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def compile_quietly(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    dynamic: bool | None,
    report: Callable[[BaseException], None],
    left: Callable[[CodeType], None],
) -> Callable[..., Any]:
    """``torch.compile(function, backend=backend, dynamic=dynamic)``, except that no error of Dynamo's gets out.

    ``report`` is called with the reason why a graph ends (``stack_of`` gives the place), ``left`` with code that Dynamo
    has captured too often.
    """
    import torch._dynamo

    context: Any = torch._dynamo.optimize(backend, dynamic=dynamic)
    if hasattr(context, "callback"):  # otherwise the user has switched Dynamo off
        context.callback = _Frames(context.callback, report, left)
    # PyTorch marks in the process that something is traced, and refuses to call compiled functions in all its threads.
    with compile_lock(), replace((torch.fx._symbolic_trace, "is_fx_symbolic_tracing", lambda: False)):
        return cast(Callable[..., Any], context(function))


def checks_custom_operations() -> bool:
    """Whether the only dispatch mode is PyTorch's check of custom operations, around the first call of a graph."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [type(mode).__name__ for mode in modes] == ["_AnalyzeCustomOpInputOutputMode"]


def is_graph_break(error: BaseException) -> bool:
    """Whether this is how Dynamo leaves code to Python, and not an error of its own."""
    from torch._dynamo.exc import Unsupported

    return isinstance(error, Unsupported)


def stack_of(error: BaseException) -> list[FrameSummary]:
    """Where Dynamo stopped in the captured code, the innermost call last."""
    return list(getattr(error, "real_stack", None) or ())


class DispatchModeWithoutDynamo(TorchDispatchMode):
    """A dispatch mode that Dynamo leaves alone. PyTorch's own modes load Dynamo for that, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)  # type: ignore[no-untyped-call]
        skip_code(cls.__torch_dispatch__.__code__)
