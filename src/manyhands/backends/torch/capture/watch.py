"""Watches a function while it is traced, so that tracing leaves nothing behind and bakes nothing in.

Tensors from outside the arguments take part in a trace as they are. Three things could go wrong, and are handled here.
``loss.backward()`` puts fake gradients into their ``.grad``: these become results of the trace, and the former
gradients are restored. An in-place operation on only such tensors, or with constants
(``count.add_(torch.tensor(1.0))``), is really executed by ``make_fx``: the former values are restored. And numbers that
are read from them (``step.item()``) would become constants of the trace: that is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import why
from manyhands.backends.torch.compat import FakeTensor, TorchDispatchMode, no_dispatch_modes, tree_leaves
from manyhands.backends.torch.guards.state import Outside
from manyhands.backends.torch.virtual import VirtualTensor
from manyhands.errors import CannotTrace, ChangesOutside, NotYet

_aten = torch.ops.aten
# What turns a tensor into Python values without an operation that a trace would see.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_grad: Any = torch.Tensor.grad
_GRADIENT = (_grad.__get__, _grad.__set__, _grad.__delete__)
_READING = (
    "it reads values of a tensor from outside (.item()), which may change by the next call (where an optimizer does "
    "so, as Adam with its step count, make it with fused=True, or on a GPU with capturable=True)"
)
_TEXTS = {"__repr__", "__format__"}
_TEXT = "it formats a tensor's values as text, and they are not known while it is traced"
_OFFSET = "it reads where a tensor begins in its memory (storage_offset), which may differ in the next call"
_data: Any = torch.Tensor.data
_MOVES = {_aten.set_, _aten.resize_, _aten.resize_as_}  # give a tensor other memory: a real one would get a made-up one
_UNKNOWN = (compat.DataDependentOutputException, compat.DynamicOutputShapeException)
_LITERALS = {_aten.lift_fresh, _aten.lift_fresh_copy}  # of torch.tensor(1.0), written in the function
_MOVING = "it replaces a tensor's memory (w.data = ..., w.set_(...)): write into its memory instead, w.copy_(...)"


class Watch:
    """A scope for tracing; afterwards it knows which gradients the function leaves where."""

    def __init__(self, outside: Outside, *, refuse_gradients: bool = False, to_compile: bool = False) -> None:
        """``refuse_gradients``: stand-ins of arguments have none, so if one has, none may be looked at."""
        self._outside = outside
        self._to_compile = to_compile
        self.refuse_gradients = refuse_gradients
        self.seeded = False  # it sets the state of random numbers, as checkpointing does around what it does again
        self._fact: Any = None
        self._changed_attribute: str | None = None
        self._filled_cache: str | None = None
        self._refused: CannotTrace | None = None
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # leaves with their first gradient
        self._gradients: set[int] = set()  # the ids of leaves to which a gradient may flow, or whose gradient is asked
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        torch.clear_autocast_cache()  # of real weights, cast before; and below, of made-up ones
        self._remembers_casts = torch.is_autocast_cache_enabled()
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._outside.optimizer(optimizer))
        self._stack.callback(self._hook.remove)
        if not self._to_compile:
            self._stack.enter_context(compat.attention_as_in_plain_execution())
        place: Any = torch.random
        self._stack.callback(setattr, place, "default_generator", place.default_generator)
        place.default_generator = _NoSeeds(self, place.default_generator)
        return self

    def watching(self) -> ExitStack:
        """The modes, for the traced function alone."""
        modes = ExitStack()
        # Autocast casts a weight once, however often it is used; what traces would have it cast anew at each use.
        modes.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(self._remembers_casts)
        modes.enter_context(_Functions(self))
        modes.enter_context(_Operations(self))
        return modes

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The tensors from outside whose ``.grad`` the function sets, and what to; to be asked while tracing."""
        left: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for tensor, before in self._before.values():
            now = tensor.grad
            if now is before:
                continue
            if now is not None and not isinstance(now, FakeTensor):
                raise CannotTrace("it sets .grad to a tensor from outside")
            left.append((tensor, now))
        return left

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        torch.clear_autocast_cache()
        for tensor, before in self._before.values():
            tensor.grad = before
        with torch.no_grad():
            for tensor, saved in self._saved.values():
                tensor.copy_(saved)
        self._fact = self._outside.changed() if not self._outside.holds() else None
        if self._fact is not None:
            self._outside.put_back()
        spaces = self._outside.spaces
        self._changed_attribute, self._filled_cache = spaces.changed(), spaces.filled()
        if self._changed_attribute is not None or self._filled_cache is not None:
            spaces.put_back()
        spaces.forget()

    def must_not_have_changed(self) -> None:
        """Refuse a function that changes Python state outside itself: replaying would not change it."""
        if self._refused is not None:  # also where the function itself has caught it
            raise self._refused
        if self._fact is not None and self._fact.optimizer:
            raise NotYet(
                f"the optimizer changed {self._fact.name} in this call: state that is made at the first step is there "
                "at the next call, which is planned; numbers that change at every step cannot be planned"
            )
        changed = self._changed_attribute if self._fact is None else self._fact.name
        if changed is not None:
            raise ChangesOutside(f"it changes {changed}, which is outside it")
        if self._filled_cache is not None:
            raise NotYet(f"{self._filled_cache} caches a result of this call: the next call is planned")

    def known(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Leaves from outside whose gradients matter, with the gradient that they had."""
        return [self._before[number] for number in self._before if number in self._gradients]

    # Called by the modes

    def sees(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, VirtualTensor):
            self.refuses("a tensor on a virtual device comes from outside: pass it as an argument")
        if isinstance(tensor, FakeTensor) or not tensor.requires_grad:
            return
        recorded, number = torch.is_grad_enabled(), id(tensor)
        if number in self._before and (number in self._gradients or not recorded):
            return
        if compat.is_functorch_tensor(tensor):  # torch.func's own, of something made up
            return
        if tensor.is_leaf:
            if recorded and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
                self.refuses("a tensor from outside has hooks, which a plan would not call")
            self._before.setdefault(number, (tensor, tensor.grad))
            if recorded:
                self._gradients.add(number)
        elif recorded:
            raise CannotTrace("gradients would flow into a tensor that was computed outside")

    def sees_gradient(self, tensor: torch.Tensor) -> None:
        """Its gradient is asked for, set or taken away; a frozen weight may have one, too."""
        self.sees(tensor)
        if not isinstance(tensor, FakeTensor) and tensor.is_leaf:
            self._before.setdefault(id(tensor), (tensor, tensor.grad))
            self._gradients.add(id(tensor))

    def refuses_reading(self, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and _is_from_outside(tensor):
            self.refuses(_READING)

    def refuses(self, reason: str) -> None:
        self._refused = CannotTrace(reason)
        raise self._refused

    def refused(self, error: Exception) -> None:
        """A value or a shape is needed that is not known. The function must not go on by an ``except`` of its own."""
        self._refused = self._refused or CannotTrace(why(error))

    def keeps(self, tensor: torch.Tensor) -> None:
        """Tracing is about to write to a real tensor."""
        if id(tensor) in self._saved:
            return
        with no_dispatch_modes(), torch.no_grad():
            self._saved[id(tensor)] = (tensor, tensor.detach().clone())


class _NoSeeds:
    """Stands before PyTorch's random numbers while a function is traced: a plan begins where they are, and goes on."""

    def __init__(self, watch: Watch, generator: torch.Generator) -> None:
        self._watch, self._generator, self._thread = watch, generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name not in ("manual_seed", "seed", "set_state") or self._thread != threading.get_ident():
            return getattr(self._generator, name)
        if name != "set_state":
            self._watch.refuses("it seeds a random generator")
        self._watch.seeded = True
        return lambda state: self._generator


class _Functions(TorchFunctionMode):
    """Sees what is called in Python: leaves before a gradient can come to them, numbers that are read."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args:
            self._watch.refuses_reading(args[0])
        if name in _TEXTS:
            self._watch.refuses(_TEXT)
        if name == "storage_offset":
            self._watch.refuses(_OFFSET)
        if func == _data.__set__:
            self._watch.refuses(_MOVING)
        if self._watch.refuse_gradients and func in _GRADIENT and isinstance(args[0], FakeTensor):
            raise CannotTrace("it looks at .grad while an argument has a gradient from before")
        with compat.no_torch_functions():
            if func in _GRADIENT:
                self._watch.sees_gradient(args[0])
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._watch.sees(leaf)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees what is computed: numbers that are read, tensors that tracing may write to."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            self._watch.refuses_reading(args[0])
        if torch.is_anomaly_enabled():
            self._watch.refuses("torch.autograd.detect_anomaly() must see every derivative")
        if func.overloadpacket in _MOVES:
            self._watch.refuses(_MOVING)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for argument in tensors:
            self._watch.sees(argument)
        if func._schema.is_mutable:
            real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
            for argument in real:
                # Beside made-up ones only single numbers: make_fx computes with those that it knows.
                if len(real) == len(tensors) or argument.numel() <= 1:
                    self._watch.keeps(argument)
        try:
            results = _apart(func(*args, **(kwargs or {})))
        except _UNKNOWN as error:
            self._watch.refused(error)
            raise
        if func.overloadpacket not in _LITERALS and any(map(_is_from_outside, tensors)):
            for result in tree_leaves(results):
                if isinstance(result, FakeTensor):
                    result.from_outside = True  # type: ignore[attr-defined]
        return results


def _is_from_outside(tensor: torch.Tensor) -> bool:
    """Whether it is a real tensor, or computed from one: make_fx knows the numbers of a few, and would read them."""
    return not isinstance(tensor, FakeTensor) or getattr(tensor, "from_outside", False)


def _apart(results: Any) -> Any:
    """Two tensors for two results, where a description gives one of them twice.

    The real operation gives two (the gradients of an LSTM's biases), and so would the function.
    """
    if not isinstance(results, tuple) or len({id(result) for result in results}) == len(results):
        return results
    apart: list[Any] = []
    for result in results:
        repeated = isinstance(result, torch.Tensor) and any(result is other for other in apart)
        apart.append(result.clone() if repeated else result)
    return tuple(apart)
