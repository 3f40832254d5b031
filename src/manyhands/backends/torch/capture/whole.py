"""Traces a function whole, with backward passes and optimizers, for ``parallel(fn, pure=True)``.

``make_fx`` runs the function once, with fake tensors in place of its arguments. Tensors from outside become constants
of the trace: their values are read at every replay. All else that the function reads in Python is read once.

Some things would go wrong silently while real tensors from outside take part in a trace with fake ones:

- ``loss.backward()`` puts fake gradients into their ``.grad``: these become results of the trace, and the former
  gradients are restored.
- An in-place operation on only such tensors (``count.add_(1)``) is really executed: the former values are restored.
- A number that is read from one (``step.item()``, ``torch.equal``) would become a constant: that is refused.
- An optimizer may create its state: it is restored, and the function is traced at the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.call import BY_VALUE, Call, first_of_each
from manyhands.backends.torch.capture.reasons import why
from manyhands.backends.torch.capture.trace import Trace, trace_of_graph
from manyhands.backends.torch.compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    no_dispatch_modes,
    tensors_in,
    tree_leaves,
)
from manyhands.backends.torch.passes import split_convolutions
from manyhands.backends.torch.virtual import VirtualTensor, home, no_hooks
from manyhands.errors import CannotTrace, NotYet, type_in_words

_aten = torch.ops.aten
# Methods that turn a tensor into Python values without an operation that the trace would record.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_READS |= {"__repr__", "__format__"}
_grad: Any = torch.Tensor.grad
_GRADIENT = (_grad.__get__, _grad.__set__, _grad.__delete__)
_data: Any = torch.Tensor.data
_MOVES = {_aten.set_, _aten.resize_, _aten.resize_as_}  # would give a real tensor fake memory
_LITERALS = {_aten.lift_fresh, _aten.lift_fresh_copy}  # of torch.tensor(1.0) in the function
_READING = (
    "it reads values of a tensor from outside (.item()), which may change by the next call (where an optimizer does "
    "so, as Adam with its step count, make it with fused=True, or on a GPU with capturable=True)"
)
_MOVING = "it replaces a tensor's memory (w.data = ..., w.set_(...)): write into its memory instead, w.copy_(...)"


@dataclass(frozen=True)
class Whole:
    """A function traced as a whole."""

    trace: Trace
    structure: Any  # of its result
    # The last outputs of the trace are new gradients of these tensors. False: the function removes the gradient.
    gradients: Sequence[tuple[torch.Tensor, bool]]
    holds: Callable[[], bool]  # whether what the trace depends on outside its arguments is as it was

    def result(self, values: Sequence[Any]) -> Any:
        """The function's result from the values of a run; gradients go where the function would have put them."""
        count = self.structure.num_leaves
        gradients = iter(values[count:])
        for tensor, there in self.gradients:
            tensor.grad = next(gradients) if there else None
        return compat.tree_unflatten(list(values[:count]), self.structure)


def trace_whole(function: Callable[..., Any], call: Call) -> Whole:
    """The trace of a call; :class:`CannotTrace` says why there is none."""
    for tensor in call.tensors:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter, VirtualTensor):
            raise CannotTrace(f"an argument is not an ordinary tensor: {type(tensor).__name__}, {tensor.layout}")
    tracing, first = _Tracing(), first_of_each(call.tensors)
    structure: Any = None
    gradients: list[tuple[torch.Tensor, bool]] = []

    def flat(*stand_ins: torch.Tensor) -> list[Any]:
        nonlocal structure
        arguments, keywords = call.rebuild([stand_ins[number] for number in first])
        with tracing.modes():
            result = function(*arguments, **keywords)
        values, structure = compat.tree_flatten(result)
        values = [_value(value) for value in values]
        if any(tensor.is_leaf and tensor.grad is not None for tensor in stand_ins):
            raise CannotTrace(
                "backward() reaches an argument and would put a gradient into it: use torch.autograd.grad, or take the "
                "tensor from outside (a closure, a module)"
            )
        left = tracing.left_gradients()
        gradients.extend((tensor, gradient is not None) for tensor, gradient in left)
        return [*values, *(gradient for _, gradient in left if gradient is not None)]

    gpus = sorted({tensor.device.index for tensor in call.tensors if tensor.device.type == "cuda"})
    try:
        with compat.compile_lock(), torch.random.fork_rng(gpus), tracing, no_hooks(), compat.lazy_graph_modules():
            module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*_stand_ins(call.tensors))
    except Exception as error:
        tracing.check()  # the better reason
        raise error if isinstance(error, CannotTrace) else CannotTrace(why(error)) from error
    tracing.check()
    whole = trace_of_graph(module)
    _refuse_memory(whole, call, structure.num_leaves)
    trace = split_convolutions(whole)
    return Whole(trace, structure, gradients, tracing.holds(trace.constant_values()))


def _value(value: Any) -> Any:
    """A result as it is traced: a loss after its backward pass is its value."""
    if not isinstance(value, (torch.Tensor, *BY_VALUE)):
        raise CannotTrace(f"a result is {type_in_words(value)}: return tensors and numbers in lists, tuples and dicts")
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    if not compat.is_spent(value):
        raise CannotTrace(
            "a result carries gradients that would be computed later: compute them inside the function, call it under "
            "torch.no_grad(), or leave out pure=True"
        )
    return value.detach()


def _refuse_memory(trace: Trace, call: Call, count: int) -> None:
    """Refuse to return the caller's memory, and to write to it where arguments share it."""
    if trace.memories_of(trace.outputs[:count]) & trace.callers_memories():
        raise CannotTrace("a result is one of the arguments or a tensor from outside, or shares its memory")
    if call.shares_memory and trace.memories_of(trace.inputs) & trace.written_memories():
        raise CannotTrace("two of the arguments share memory, and it writes to an argument")


def _stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that are traced in place of the arguments; for virtual devices, fake tensors on that device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if any(isinstance(t, VirtualTensor) for t in tensors) else None
    stand_ins: list[torch.Tensor] = []
    for tensor in tensors:
        if mode is None:
            stand_in = tensor.detach()
            if type(tensor) is nn.Parameter:  # the function may ask what it is
                stand_in = nn.Parameter(stand_in, requires_grad=False)
        elif isinstance(tensor, VirtualTensor):
            form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            stand_in = FakeTensor(mode, form, home(tensor))
        else:
            stand_in = mode.from_tensor(tensor.detach())
        stand_ins.append(stand_in.requires_grad_(tensor.requires_grad))
    return stand_ins


class _Tracing:
    """A scope for one trace: what it would leave behind is put back, and what it would bake in is refused.

    What the trace depends on outside its arguments is remembered: gradients from before, and optimizers.
    """

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # leaves, with their gradients
        self._optimizers: dict[torch.optim.Optimizer, tuple[Any, ...]] = {}
        self._put_back: list[Callable[[], None]] = []  # for the optimizers
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._refused: CannotTrace | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        torch.clear_autocast_cache()  # drops casts of real weights; in __exit__, of fake ones
        self._casts, self._recorded = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
        self._hook = register_optimizer_step_pre_hook(self._see_optimizer)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        torch.set_grad_enabled(self._recorded)
        torch.clear_autocast_cache()
        with torch.no_grad():
            for tensor, saved in self._saved.values():
                tensor.copy_(saved)
        for tensor, before in self._gradients.values():
            tensor.grad = before
        if any(_facts(optimizer) != facts for optimizer, facts in self._optimizers.items()):
            for put_back in self._put_back:
                put_back()
            self._refused = self._refused or NotYet(
                "the optimizer changed its state or settings in this call: state that is made at the first step is "
                "there at the next call, which is planned; numbers that change at every step cannot be planned: give "
                "a tensor, as in SGD(..., lr=torch.tensor(0.1), fused=True)"
            )
        self._put_back.clear()

    def check(self) -> None:
        if self._refused is not None:  # even if the function has caught the error
            raise self._refused

    def refuse(self, reason: str) -> None:
        self._refused = CannotTrace(reason)
        raise self._refused

    def modes(self) -> ExitStack:
        """The modes that are active while the function runs."""
        modes = ExitStack()
        # Autocast casts a weight once, however often it is used; make_fx switches that cache off.
        modes.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(self._casts)
        modes.enter_context(_Functions(self))
        modes.enter_context(_Operations(self))
        return modes

    def left_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The tensors whose ``.grad`` the function has set, with the new gradients; called while tracing."""
        left = [(tensor, tensor.grad) for tensor, before in self._gradients.values() if tensor.grad is not before]
        if any(gradient is not None and not isinstance(gradient, FakeTensor) for _, gradient in left):
            raise CannotTrace("it sets .grad to a tensor from outside")
        return left

    def holds(self, constants: Sequence[torch.Tensor]) -> Callable[[], bool]:
        """A check, to be called before every replay, whether what the trace depends on outside is as it was."""
        read = {id(value) for value in constants}
        same = [(tensor, before) for tensor, before in self._gradients.values() if id(before) in read]
        there = [(tensor, before is not None) for tensor, before in self._gradients.values() if id(before) not in read]
        on_gpus = [value for value in constants if value.is_cuda]
        in_place = compat.arguments_lie_at({number: value.data_ptr() for number, value in enumerate(on_gpus)})
        optimizers = list(self._optimizers.items())
        return lambda: (
            all(tensor.grad is before for tensor, before in same)
            and all((tensor.grad is not None) is was for tensor, was in there)
            and in_place(on_gpus)
            and all(_facts(optimizer) == facts for optimizer, facts in optimizers)
        )

    # Called by the modes below, and by optimizers

    def see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, VirtualTensor):
            self.refuse("a tensor on a virtual device comes from outside: pass it as an argument")
        if isinstance(tensor, FakeTensor) or not tensor.requires_grad or compat.is_functorch_tensor(tensor):
            return
        if not tensor.is_leaf and torch.is_grad_enabled():
            raise CannotTrace("gradients would flow into a tensor that was computed outside")
        if tensor.is_leaf:
            if torch.is_grad_enabled() and compat.has_gradient_hooks(tensor):
                self.refuse("a tensor from outside has hooks, which a plan would not call")
            self.see_gradient(tensor)

    def see_gradient(self, tensor: torch.Tensor) -> None:
        self._gradients.setdefault(id(tensor), (tensor, tensor.grad))

    def save(self, tensor: torch.Tensor) -> None:
        """Save a real tensor that tracing is about to write to."""
        if id(tensor) not in self._saved:
            with no_dispatch_modes(), torch.no_grad():
                self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def _see_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before an optimizer steps: its numbers, and the identity of its tensors."""
        if threading.get_ident() != self._thread or optimizer in self._optimizers:
            return
        self._optimizers[optimizer] = _facts(optimizer)
        groups = [dict(group) for group in optimizer.param_groups]
        state = {parameter: dict(values) for parameter, values in optimizer.state.items()}

        def put_back() -> None:
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            optimizer.state.clear()
            optimizer.state.update(state)

        self._put_back.append(put_back)


def _facts(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Numbers and other plain values of an optimizer, and the identity of its tensors."""

    def fact(value: Any) -> Any:
        if isinstance(value, BY_VALUE):
            return value
        if isinstance(value, (list, tuple)):
            return tuple(map(fact, value))
        return id(value)

    groups = [(name, fact(value)) for group in optimizer.param_groups for name, value in group.items()]
    state = [
        (id(parameter), name, fact(value))
        for parameter, values in optimizer.state.items()
        for name, value in values.items()
    ]
    return tuple(groups), tuple(state)


class _Functions(TorchFunctionMode):
    """Sees calls in Python: gradients that are looked at, and values that are read."""

    def __init__(self, tracing: _Tracing) -> None:
        super().__init__()
        self._tracing = tracing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with compat.no_torch_functions():
            if getattr(func, "__name__", "") in _READS and args and _is_from_outside(args[0]):
                self._tracing.refuse(_READING)
            if func == _data.__set__:
                self._tracing.refuse(_MOVING)
            if func in _GRADIENT and not isinstance(args[0], FakeTensor) and args[0].is_leaf:
                self._tracing.see_gradient(args[0])
            for tensor in tensors_in((args, kwargs)):
                self._tracing.see(tensor)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees operations: values that are read, and tensors that tracing may write to."""

    def __init__(self, tracing: _Tracing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracing = tracing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracing = self._tracing
        tensors = tensors_in((args, kwargs))
        from_outside = any(map(_is_from_outside, tensors))
        if torch.Tag.data_dependent_output in func.tags and from_outside:
            tracing.refuse(_READING)
        if func.overloadpacket in _MOVES:
            tracing.refuse(_MOVING)
        for argument in tensors:
            tracing.see(argument)
        if compat.schema(func).is_mutable:
            real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
            for argument in real:
                # With fake operands only single numbers: make_fx computes with numbers that it knows.
                if len(real) == len(tensors) or argument.numel() <= 1:
                    tracing.save(argument)
        results = _apart(func(*args, **(kwargs or {})))
        if func.overloadpacket not in _LITERALS and from_outside:
            for result in tree_leaves(results):
                if isinstance(result, FakeTensor):
                    result.from_outside = True  # type: ignore[attr-defined]
        return results


def _is_from_outside(tensor: Any) -> bool:
    """Whether a tensor is real, or computed from a real one: make_fx may know its values, and would bake them in."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return not isinstance(tensor, FakeTensor) or getattr(tensor, "from_outside", False)


def _apart(results: Any) -> Any:
    """The results, with a clone in place of a fake tensor that is there twice.

    The real operation returns two tensors (the gradients of an LSTM's biases).
    """
    if not isinstance(results, tuple) or len({id(result) for result in results}) == len(results):
        return results
    apart: list[Any] = []
    for result in results:
        repeated = isinstance(result, torch.Tensor) and any(result is other for other in apart)
        apart.append(result.clone() if repeated else result)
    return tuple(apart)
