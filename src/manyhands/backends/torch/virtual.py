"""Numbered CPU devices for PyTorch, so that code for several GPUs runs, and fails, as it would there.

PyTorch knows ``torch.device("cpu", 1)`` as a name, but a tensor made there is on plain ``cpu``. Here a
:class:`VirtualTensor` is a tensor that says it is on ``cpu:1`` and holds a plain tensor inside; every
operation is computed on what is inside, and its results are wrapped again. Operands on different
devices are refused in PyTorch's own words, as with GPUs (a scalar from the host may join anywhere).

Two hooks, set when virtual devices are asked for, let tensors come into being: a dispatch mode
sees every ``torch.ones(..., device="cpu:1")``, ``x.to("cpu:1")`` and ``Module.to``, also in a backward
pass; a function mode sees ``torch.tensor([...], device="cpu:1")``, which never reaches the dispatcher
with its device. Both hold for the thread that set them; :func:`place` works in every thread, and so does what is
done within :func:`hooks`.

``torch.device("cpu:0")`` is then virtual device 0; as a *name* for our verbs, ``"cpu:0"`` is the host, as everywhere.

What it is not: fast (an operation costs some microseconds more). A tensor keeps the shape that it was born with:
``x.t_()``, ``x.resize_(...)`` and an ``out=`` of another size are refused. A lazy module is moved after its first call.
``torch.load(map_location="cpu:1")`` is refused by PyTorch: load to ``"cpu"``, then ``mh.to``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import (
    DeviceContext,
    TorchDispatchMode,
    dispatch_mode_stack,
    function_mode_stack,
    no_dispatch_modes,
    tree_iter,
    tree_map_only,
)

_count = 0
_HOST = torch.device("cpu")

_aten = torch.ops.aten
# Operations that take tensors of two devices on GPUs too.
_ACROSS_DEVICES = {_aten.copy_.default, _aten._to_copy.default, _aten.set_.source_Tensor}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)


def start(number: int) -> None:
    """Make the devices ``cpu:0`` to ``cpu:<number - 1>``."""
    global _count
    _count = number
    torch.utils.swap_tensors = _swap_tensors  # Module.to() calls it by this name
    for hook in (_Births(), _FromData()):  # type: ignore[no-untyped-call]
        hook.__enter__()  # type: ignore[no-untyped-call]


@contextmanager
def hooks() -> Iterator[None]:
    """Let tensors come into being on virtual devices in this thread too; nothing where there are none."""
    if not _count:
        yield
        return
    with _Births(), _FromData():  # type: ignore[no-untyped-call]
        yield


def count() -> int:
    return _count


@contextmanager
def no_hooks() -> Iterator[None]:
    """Leave the hooks out, so that operations see plain tensors; nothing where there are no virtual devices."""
    if not _count:
        yield
        return
    with no_dispatch_modes():
        yield


def only_hooks() -> bool:
    """Whether no dispatch mode but ours is active in this thread."""
    return all(isinstance(mode, _Births) for mode in dispatch_mode_stack())


def only_known_functions() -> bool:
    """Whether no function mode is active in this thread but ours and PyTorch's own for the default device."""
    return all(isinstance(mode, (_FromData, DeviceContext)) for mode in function_mode_stack())


def is_virtual(device: torch.device) -> bool:
    return device.type == "cpu" and device.index is not None


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in a virtual one, or the tensor itself."""
    return tensor._inner if isinstance(tensor, VirtualTensor) else tensor


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor's content on another device, with gradients that flow back; works in every thread."""
    if tensor.device.type == "cpu" and device.type == "cpu":
        return tensor if tensor.device == device else _Place.apply(tensor, device)  # type: ignore[no-untyped-call]
    return tensor.to(device)


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual device: its metadata here, its numbers in ``_inner`` on the host."""

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> VirtualTensor:
        made: VirtualTensor = compat.make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=False,
        )
        made._inner = inner
        return made

    def __init__(self, inner: torch.Tensor, device: torch.device) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["_inner"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: torch.device, size: object, stride: object
    ) -> VirtualTensor:
        return VirtualTensor(inner["_inner"], device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _compute(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = f"{self._inner!r}"[:-1] + f", device='{self.device}'"
        if self.grad_fn is not None:
            text += f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            text += ", requires_grad=True"
        return f"Parameter containing:\n{text})" if isinstance(self, torch.nn.Parameter) else f"{text})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, VirtualTensor) and (value.device, value.shape) == (self.device, self.shape):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self._inner = value._inner
        else:
            _become(self, value)

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        made = torch.tensor(data, dtype=dtype or self.dtype, device=_HOST)
        return place(made, self.device if device is None else torch.device(device)).requires_grad_(requires_grad)

    def tolist(self) -> Any:
        return self._inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __array__(self, dtype: object = None) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                made: torch.Tensor = VirtualTensor(self._inner.clone(), self.device)
            if isinstance(self, torch.nn.Parameter):
                made = torch.nn.Parameter(made, self.requires_grad)
            else:
                made.requires_grad_(self.requires_grad)
            if self.grad is not None:
                made.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = made
        return memo[id(self)]  # type: ignore[no-any-return]


_swap_plain_tensors = torch.utils.swap_tensors


def _swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """``torch.utils.swap_tensors`` that also swaps virtual tensors with weak references to them or views of them.

    PyTorch refuses those. But ``Module.to`` swaps parameters on their way to a virtual device, and on their way to a
    GPU, where it sets ``parameter.data``, it takes them: after ``torch.compile`` or with ``weight_norm``, for example.
    """
    if not isinstance(t1, VirtualTensor) and not isinstance(t2, VirtualTensor):
        _swap_plain_tensors(t1, t2)  # type: ignore[no-untyped-call]
        return
    hooks, after_hooks = t1._backward_hooks, t1._post_accumulate_grad_hooks
    compat.swap_tensor_impl(t1, t2)  # first: where it refuses, nothing has changed
    t1.__class__, t2.__class__ = t2.__class__, t1.__class__
    t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
    _end_graph(t2, t1.device)
    if hooks is not None:
        t1._backward_hooks = hooks
    if after_hooks is not None:
        t1._post_accumulate_grad_hooks = after_hooks


def _end_graph(leaf: torch.Tensor, device: torch.device) -> None:
    """Let a backward pass through what was computed from this parameter fail: its gradient would reach nobody."""
    if not (leaf.requires_grad and leaf.is_leaf):
        return
    source, shape = leaf.device, tuple(leaf.shape)

    def refuse(*unused: object) -> None:
        raise RuntimeError(
            f"a parameter of shape {shape} was moved from {source} to {device} between the forward and the backward "
            "pass: call backward() before the move, or repeat the forward pass after it"
        )

    torch.autograd.graph.get_gradient_edge(leaf).node.register_prehook(refuse)


def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor other contents, perhaps on another device; its gradient goes with it where that is possible."""
    gradient, requires_grad = tensor.grad, tensor.requires_grad
    if gradient is not None and gradient.shape != value.shape:
        raise RuntimeError(
            f"x.data = y: y has another shape, {tuple(value.shape)}, than x.grad, {tuple(gradient.shape)}: set "
            "x.grad = None before"
        )
    made = value.detach()
    _swap_tensors(tensor, torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made)
    tensor.requires_grad_(requires_grad)
    if gradient is None:
        return
    if (gradient.device, gradient.dtype) != (tensor.device, tensor.dtype):
        _swap_tensors(gradient, place(gradient.detach(), tensor.device).to(tensor.dtype))
    tensor.grad = gradient


class _Place(torch.autograd.Function):
    """A move between the host and a virtual device, or between two; the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.source = tensor.device
        inner = tensor._inner if isinstance(tensor, VirtualTensor) else tensor
        return _wrapped(inner.clone(), device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return place(gradients[0], ctx.source), None


class _Births(TorchDispatchMode):
    """Sees operations without a virtual operand that shall give a tensor on a virtual device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or device.type != "cpu" or device.index is None:
            return func(*args, **kwargs)
        if args and isinstance(args[0], UninitializedTensorMixin):
            raise RuntimeError(
                f"a lazy module has no weights yet that could go to {device}: call it once on the host, then move it"
            )
        return _compute(func, args, kwargs)


class _FromData(TorchFunctionMode):
    """Sees ``torch.tensor(data, device=...)``: made on the host, then placed; and ``x.data = y`` of a host's x."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_DATA:
            wanted = kwargs.get("device")
            # PyTorch adds its default device only below this hook.
            device = torch.get_default_device() if wanted is None else torch.device(wanted)
            if device.type == "cpu" and device.index is not None:
                requires_grad = kwargs.pop("requires_grad", False)
                made = place(func(*args, **{**kwargs, "device": _HOST}), device)
                return made.detach().requires_grad_() if requires_grad else made
        elif func == _SET_DATA and isinstance(args[1], VirtualTensor) and not isinstance(args[0], VirtualTensor):
            return _become(*args)
        return func(*args, **kwargs)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on what is inside, and wrap what comes out."""
    wanted = kwargs.get("device")
    if wanted is not None:
        _check_exists(wanted)
        kwargs = {**kwargs, "device": _HOST if wanted.type == "cpu" else wanted}
    target = wanted if wanted is not None else _common_device(func, args, kwargs)
    inner_args, inner_kwargs = tree_map_only(VirtualTensor, _inner, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    # What an operation gives back of its own arguments (in-place, out=) is the argument, not a new tensor.
    given = {id(value): value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)}
    _refuse_new_shapes(func, given.values())
    given |= {id(value._inner): value for value in given.values() if isinstance(value, VirtualTensor)}
    return tree_map_only(torch.Tensor, lambda t: given[id(t)] if id(t) in given else _wrapped(t, target), result)


def _refuse_new_shapes(func: Callable[..., Any], tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor) or tensor._inner.shape == tensor.shape:
            continue
        shape = tuple(tensor._inner.shape)
        with suppress(RuntimeError):  # back to what is outside, so that it can still be used
            tensor._inner = tensor._inner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        raise RuntimeError(
            f"{func} changes a shape in place ({tuple(tensor.shape)} to {shape}), which a virtual device cannot: use "
            "the form that gives a new tensor"
        )


def _inner(tensor: VirtualTensor) -> torch.Tensor:
    return tensor._inner


def _wrapped(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or device.index is None or isinstance(tensor, VirtualTensor):
        return tensor
    return VirtualTensor(tensor, device)


def _common_device(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.device:
    """The device that the result is on; operands on several are refused as with GPUs."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    virtual = dict.fromkeys(tensor.device for tensor in tensors if isinstance(tensor, VirtualTensor))
    if func in _ACROSS_DEVICES:
        return tensors[0].device
    host = any(not isinstance(tensor, VirtualTensor) and tensor.dim() > 0 for tensor in tensors)
    if len(virtual) > 1 or host:
        found = [str(device) for device in virtual] + (["cpu"] if host else [])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(found[:2])}!"
        )
    return next(iter(virtual))


def _check_exists(device: torch.device) -> None:
    if device.type == "cpu" and device.index is not None and device.index >= _count:
        raise RuntimeError(f"there is no virtual device {device}: this process has {_count} of them")
