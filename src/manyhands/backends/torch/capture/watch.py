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
from manyhands.backends.torch.capture.module_paths import ModulePaths
from manyhands.backends.torch.capture.reasons import why
from manyhands.backends.torch.compat import FakeTensor, TorchDispatchMode, no_dispatch_modes, tree_leaves
from manyhands.backends.torch.guards.executed import Executed
from manyhands.backends.torch.guards.state import Outside
from manyhands.backends.torch.virtual import VirtualTensor
from manyhands.errors import CannotTrace, ChangesOutside, NotYet

_aten = torch.ops.aten
# Methods that turn a tensor into Python values without an operation that the trace would record.
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
_MOVES = {
    _aten.set_,
    _aten.resize_,
    _aten.resize_as_,
}  # give a tensor other memory: a real tensor would get fake memory
_UNKNOWN = (compat.DataDependentOutputException, compat.DynamicOutputShapeException)
_LITERALS = {_aten.lift_fresh, _aten.lift_fresh_copy}  # of torch.tensor(1.0) in the function
_MOVING = "it replaces a tensor's memory (w.data = ..., w.set_(...)): write into its memory instead, w.copy_(...)"


class Watch:
    """A scope for tracing; inside, :meth:`gradients` gives the gradients that the function leaves behind."""

    def __init__(self, outside: Outside, *, refuse_gradients: bool = False, to_compile: bool = False) -> None:
        """``refuse_gradients``: an argument has a gradient, which its stand-in has not, so none may be looked at."""
        self._outside = outside
        self._to_compile = to_compile
        self.refuse_gradients = refuse_gradients
        self.module_paths = ModulePaths()
        self.seeded = False  # the function sets the state of a generator, as checkpointing does before it recomputes
        self._fact: Any = None
        self._changed_attribute: str | None = None
        self._filled_cache: str | None = None
        self._refused: CannotTrace | None = None
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # leaves with the gradient that they had
        self._gradients: set[int] = set()  # ids of leaves that may get a gradient, or whose gradient is read
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._executed = Executed(outside.doubtful())
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        torch.clear_autocast_cache()  # drops casts of real weights; in __exit__, of fake ones
        self._remembers_casts = torch.is_autocast_cache_enabled()
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._outside.optimizer(optimizer))
        self._stack.callback(self._hook.remove)
        if not self._to_compile:
            self._stack.enter_context(compat.attention_as_in_plain_execution())
        place: Any = torch.random
        self._stack.callback(setattr, place, "default_generator", place.default_generator)
        place.default_generator = _NoSeeds(self, place.default_generator)
        self._stack.enter_context(self._executed)
        return self

    def watching(self) -> ExitStack:
        """The modes that are active while the function runs."""
        modes = ExitStack()
        # Autocast casts a weight once, however often it is used; make_fx switches that cache off.
        modes.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(self._remembers_casts)
        modes.enter_context(_Functions(self))
        modes.enter_context(_Operations(self))
        return modes

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The tensors from outside whose ``.grad`` the function sets, with the new gradients; call it while tracing."""
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
        self._outside.put_generators_back()
        self._outside.forget_stand_ins()
        self._fact = self._outside.changed() if not self._outside.holds() else None
        if self._fact is not None:
            self._outside.put_back()
        spaces = self._outside.spaces
        self._changed_attribute, self._filled_cache = spaces.changed(), spaces.filled()
        if self._changed_attribute is not None or self._filled_cache is not None:
            spaces.put_back()
        spaces.forget()

    def must_not_have_changed(self) -> None:
        """Refuse a function that changes Python state outside itself, which a replay would not do."""
        if self._refused is not None:  # even if the function has caught the error
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
        self._outside.only_executed(self._executed)

    def known(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Leaves from outside whose gradients matter, with the gradient that they had."""
        return [self._before[number] for number in self._before if number in self._gradients]

    # Called by the modes below

    def see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, VirtualTensor):
            self.refuse("a tensor on a virtual device comes from outside: pass it as an argument")
        if isinstance(tensor, FakeTensor) or not tensor.requires_grad:
            return
        recorded, number = torch.is_grad_enabled(), id(tensor)
        if number in self._before and (number in self._gradients or not recorded):
            return
        if compat.is_functorch_tensor(tensor):  # a wrapper of torch.func around a fake tensor
            return
        if tensor.is_leaf:
            if recorded and compat.has_gradient_hooks(tensor):
                self.refuse("a tensor from outside has hooks, which a plan would not call")
            self._before.setdefault(number, (tensor, tensor.grad))
            if recorded:
                self._gradients.add(number)
        elif recorded:
            raise CannotTrace("gradients would flow into a tensor that was computed outside")

    def see_gradient(self, tensor: torch.Tensor) -> None:
        """A gradient is read, set or removed; a frozen weight may have one, too."""
        self.see(tensor)
        if not isinstance(tensor, FakeTensor) and tensor.is_leaf:
            self._before.setdefault(id(tensor), (tensor, tensor.grad))
            self._gradients.add(id(tensor))

    def refuse_reading(self, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and _is_from_outside(tensor):
            self.refuse(_READING)

    def refuse(self, reason: str) -> None:
        self._refused = CannotTrace(reason)
        raise self._refused

    def remember_error(self, error: Exception) -> None:
        """Remember that an unknown value or shape was needed: the function may catch the error and go on."""
        self._refused = self._refused or CannotTrace(why(error))

    def save(self, tensor: torch.Tensor) -> None:
        """Save a real tensor that tracing is about to write to."""
        if id(tensor) in self._saved:
            return
        with no_dispatch_modes(), torch.no_grad():
            self._saved[id(tensor)] = (tensor, tensor.detach().clone())


class _NoSeeds:
    """Replaces PyTorch's generator while a function is traced: a plan continues them, and must not seed."""

    def __init__(self, watch: Watch, generator: torch.Generator) -> None:
        self._watch, self._generator, self._thread = watch, generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name not in ("manual_seed", "seed", "set_state") or self._thread != threading.get_ident():
            return getattr(self._generator, name)
        if name != "set_state":
            self._watch.refuse("it seeds a random generator")
        self._watch.seeded = True
        return lambda state: self._generator


class _Functions(TorchFunctionMode):
    """Sees calls in Python: leaves before they get a gradient, and values that are read."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args:
            self._watch.refuse_reading(args[0])
        if name in _TEXTS:
            self._watch.refuse(_TEXT)
        if name == "storage_offset":
            self._watch.refuse(_OFFSET)
        if func == _data.__set__:
            self._watch.refuse(_MOVING)
        if self._watch.refuse_gradients and func in _GRADIENT and isinstance(args[0], FakeTensor):
            raise CannotTrace("it looks at .grad while an argument has a gradient from before")
        with compat.no_torch_functions():
            if func in _GRADIENT:
                self._watch.see_gradient(args[0])
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._watch.see(leaf)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees operations: values that are read, and tensors that tracing may write to."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            self._watch.refuse_reading(args[0])
        if torch.is_anomaly_enabled():
            self._watch.refuse("torch.autograd.detect_anomaly() must see every derivative")
        if func.overloadpacket in _MOVES:
            self._watch.refuse(_MOVING)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for argument in tensors:
            self._watch.see(argument)
        if compat.schema(func).is_mutable:
            real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
            for argument in real:
                # With fake operands only single numbers: make_fx computes with numbers that it knows.
                if len(real) == len(tensors) or argument.numel() <= 1:
                    self._watch.save(argument)
        try:
            with self._watch.module_paths.marking():
                results = _apart(func(*args, **(kwargs or {})))
        except _UNKNOWN as error:
            self._watch.remember_error(error)
            raise
        if func.overloadpacket not in _LITERALS and any(map(_is_from_outside, tensors)):
            for result in tree_leaves(results):
                if isinstance(result, FakeTensor):
                    result.from_outside = True  # type: ignore[attr-defined]
        return results


def _is_from_outside(tensor: torch.Tensor) -> bool:
    """Whether a tensor is real, or computed from a real one: make_fx may know its values, and would bake them in."""
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
