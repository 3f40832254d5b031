"""A tensor on a virtual device, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from manyhands.backends.torch import compat
from manyhands.backends.torch.virtual.memory import VirtualMemory
from manyhands.backends.torch.virtual.names import HOST, actual, check_exists, is_virtual, shown_device, stands_in

# Called with every operation on a virtual device, its arguments and its result, as plain tensors.
observers: list[Callable[[Any, Any, Any, Any], None]] = []

_aten = torch.ops.aten
# Operations that take tensors of two devices, as on GPUs.
_ACROSS_DEVICES = {_aten.copy_.default, _aten.fill_.Tensor, _aten._to_copy.default, _aten.set_.source_Tensor}
# Operations that take indices or lengths from the host, as on GPUs.
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_WITH_LENGTHS = {
    _aten._ctc_loss,
    _aten._ctc_loss_backward,
    _aten._pack_padded_sequence,
    _aten._pack_padded_sequence_backward,
    _aten._pad_packed_sequence,
}
# Operations whose second result is on the host, also on GPUs.
_HOST_RESULTS = {_aten._pack_padded_sequence.default, _aten._pad_packed_sequence.default}


def home(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor as the dispatcher knows it."""
    return tensor._home if isinstance(tensor, VirtualTensor) else tensor.device


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in a virtual one, or the tensor itself."""
    return tensor._inner if isinstance(tensor, VirtualTensor) else tensor


def readable(data: Any) -> Any:
    """Data for ``torch.tensor``, which reads the memory of tensors in a list directly: virtual ones have none."""
    if not isinstance(data, (list, tuple)):
        return data
    return [inside(part) if isinstance(part, torch.Tensor) else readable(part) for part in data]


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on another device, with gradients that flow back; works in every thread."""
    device = actual(device)
    if isinstance(tensor, compat.FakeTensor):  # while tracing, a copy between devices is an operation like any other
        return tensor.to(device)
    if device.type == "cpu" and (is_virtual(device) or home(tensor).type == "cpu"):
        return tensor if home(tensor) == device else _Move.apply(tensor, device)  # type: ignore[no-untyped-call]
    return tensor.to(device)


class VirtualTensor(VirtualMemory, torch.Tensor):
    """A tensor on a virtual device: its metadata here, its numbers in ``_inner`` on the host."""

    # With PyTorch's default, functions written in Python would run their bodies without our function mode.
    __torch_function__ = compat.no_torch_function_of_its_own

    _inner: torch.Tensor
    _home: torch.device

    @staticmethod
    def __new__(
        cls, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = True
    ) -> VirtualTensor:
        if device is None:  # type(parameter)(data, requires_grad=False), as Accelerate does
            return torch.nn.Parameter(inner, requires_grad)  # type: ignore[return-value]
        device = actual(device)
        tensor: VirtualTensor = compat.make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=False,
        )
        tensor._inner = inner
        tensor._home = device
        return tensor

    def __init__(self, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = True) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return shown_device(self._home)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return stands_in()

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return not stands_in()

    def get_device(self) -> int:
        return self._home.index

    def record_stream(self, stream: object) -> None:
        """Nothing to do: no other stream could use the memory later."""

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["_inner"], self._home

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: torch.device, size: object, stride: object
    ) -> VirtualTensor:
        return VirtualTensor(inner["_inner"], device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket is _aten.to:  # in inference mode it comes here whole
            return move(func, args, kwargs or {})
        return compute(func, args, kwargs or {})

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
        return VirtualTensor(self._inner.detach(), self._home)  # not self.detach(): writes to it are not counted

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, VirtualTensor) and (value.device, value.shape) == (self.device, self.shape):
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self._inner = value._inner
        else:
            become(self, value)

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        tensor = torch.tensor(readable(data), dtype=dtype or self.dtype, device=HOST)
        return place(tensor, self._home if device is None else actual(device)).requires_grad_(requires_grad)

    def tolist(self) -> Any:
        return self._inner.tolist()

    # torch.FloatTensor([x]) reads x where PyTorch has switched off the dispatch to us; what is inside has the number.

    def __float__(self) -> float:
        try:
            return super().__float__()
        except RuntimeError:
            return float(self._inner)

    def __index__(self) -> int:
        try:
            return super().__index__()
        except RuntimeError:
            return self._inner.__index__()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __copy__(self) -> torch.Tensor:
        return self._hold(self._inner.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self._hold(self._inner.clone())
            if self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = copy
        return memo[id(self)]  # type: ignore[no-any-return]

    def _hold(self, inner: torch.Tensor) -> torch.Tensor:
        """A tensor of the same kind on the same device, with other numbers."""
        copy: torch.Tensor = VirtualTensor(inner, self._home)
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copy, self.requires_grad)
        return copy.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a tensor of the host, so that the file can be read without virtual devices."""
        inner = self._inner.detach()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(inner, self.requires_grad).__reduce_ex__(protocol)
        return inner.requires_grad_(self.requires_grad and self.is_leaf).__reduce_ex__(protocol)


_swap_plain_tensors = torch.utils.swap_tensors


def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """``torch.utils.swap_tensors`` that also swaps virtual tensors with weak references to them or views of them.

    PyTorch refuses to swap those. ``Module.to`` swaps parameters that go to a virtual device; for a GPU it sets
    ``parameter.data`` instead, which works with them: after ``torch.compile`` or with ``weight_norm``, for example.
    """
    if not isinstance(t1, VirtualTensor) and not isinstance(t2, VirtualTensor):
        _swap_plain_tensors(t1, t2)  # type: ignore[no-untyped-call]
        return
    hooks = compat.hooks_of(t1)
    compat.swap_tensor_impl(t1, t2)  # first: if it refuses, nothing has changed
    t1.__class__, t2.__class__ = t2.__class__, t1.__class__
    t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
    _end_graph(t2, t1.device)
    compat.set_hooks(t1, hooks)


def _end_graph(leaf: torch.Tensor, device: torch.device) -> None:
    """Make a backward pass through results of this parameter fail: its gradient would be lost."""
    if not (leaf.requires_grad and leaf.is_leaf) or isinstance(leaf, UninitializedTensorMixin):
        return
    source, shape = leaf.device, tuple(leaf.shape)

    def refuse(*unused: object) -> None:
        raise RuntimeError(
            f"a parameter of shape {shape} was moved from {source} to {device} between the forward and the backward "
            "pass: call backward() before the move, or repeat the forward pass after it"
        )

    torch.autograd.graph.get_gradient_edge(leaf).node.register_prehook(refuse)


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor new content, perhaps on another device; its gradient moves along."""
    gradient, requires_grad = tensor.grad, tensor.requires_grad
    if gradient is not None and gradient.shape != value.shape:
        raise RuntimeError(
            f"x.data = y: y has another shape, {tuple(value.shape)}, than x.grad, {tuple(gradient.shape)}: set "
            "x.grad = None before"
        )
    content = value.detach()
    swap_tensors(tensor, torch.nn.Parameter(content) if isinstance(tensor, torch.nn.Parameter) else content)
    tensor.requires_grad_(requires_grad)
    if gradient is None:
        return
    if (gradient.device, gradient.dtype) != (tensor.device, tensor.dtype):
        swap_tensors(gradient, place(gradient.detach(), tensor.device).to(tensor.dtype))
    tensor.grad = gradient


class _Move(torch.autograd.Function):
    """A move between the host and a virtual device, or between two; the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.source = home(tensor)
        return _wrap(inside(tensor).to(HOST, copy=True), device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return place(gradients[0], ctx.source), None


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on what is inside, and wrap what comes out."""
    wanted = kwargs.get("device")
    if wanted is not None:
        check_exists(wanted)
        kwargs = {**kwargs, "device": HOST if wanted.type == "cpu" else wanted}
    tensors = list(_tensors((*args, *kwargs.values())))
    operands = _operands(args) if func in _INDEXED and isinstance(args[0], VirtualTensor) else tensors
    target = wanted if wanted is not None else _common_device(func, operands)
    inner_args = _map(inside, tuple(args))
    inner_kwargs = {name: _map(inside, value) for name, value in kwargs.items()}
    result = func(*inner_args, **inner_kwargs)
    for observe in observers:
        observe(func, inner_args, inner_kwargs, result)
    if func in _HOST_RESULTS:
        return _wrap(result[0], target), result[1]
    # If an operation returns one of its arguments (in-place, out=), the result is that argument, not a new tensor.
    arguments = {id(value): value for value in tensors}
    _keep_shapes(func, arguments.values())
    arguments |= {id(value._inner): value for value in tensors if isinstance(value, VirtualTensor)}
    return _map(lambda t: arguments[id(t)] if id(t) in arguments else _wrap(t, target), result)


def move(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``aten.to``: the tensor itself if there is nothing to do."""
    arguments = {argument.name: value for argument, value in compat.arguments(func, args, kwargs)}
    tensor, other = arguments["self"], arguments.get("other")
    dtype = other.dtype if other is not None else arguments.get("dtype")
    wanted = home(other) if other is not None else arguments.get("device")
    device = home(tensor) if wanted is None else actual(wanted)
    form = arguments.get("memory_format")
    same_form = form in (None, torch.preserve_format) or tensor.is_contiguous(memory_format=form)
    if same_form and not arguments.get("copy") and device == home(tensor) and dtype in (None, tensor.dtype):
        return tensor
    how = {
        "dtype": dtype,
        "device": device,
        "non_blocking": arguments.get("non_blocking", False),
        "memory_format": form,
    }
    if is_virtual(device) or isinstance(tensor, VirtualTensor):
        return compute(_aten._to_copy.default, (tensor,), how)
    return _aten._to_copy.default(tensor, **how)


# Operations take and return tensors and lists of tensors. PyTorch's pytrees handle more, and would take longer than the
# operations themselves.


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is list:
        return [_map(function, item) for item in value]
    return tuple([_map(function, item) for item in value]) if type(value) is tuple else value


def _keep_shapes(func: Callable[..., Any], tensors: Iterable[torch.Tensor]) -> None:
    """Give virtual tensors the shapes that an operation has changed in place (``x.t_()``, ``x.squeeze_()``)."""
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor) or _form(tensor._inner) == _form(tensor):
            continue
        with suppress(RuntimeError), compat.no_torch_dispatch():
            tensor.as_strided_(*_form(tensor._inner))
            continue
        shape = tuple(tensor._inner.shape)
        with suppress(RuntimeError):  # undo it inside, so that the tensor stays usable
            tensor._inner = tensor._inner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        raise RuntimeError(
            f"{func} changes a shape in place ({tuple(tensor.shape)} to {shape}) and needs more memory for it, which "
            "a virtual device cannot do: use the form that gives a new tensor"
        )


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], Any]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset()) if tensor.layout == torch.strided else _NO_FORM


_NO_FORM = (torch.Size(), (), 0)


def _wrap(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or device.index is None or isinstance(tensor, VirtualTensor):
        return tensor
    if torch.is_inference_mode_enabled():  # PyTorch wants views of ordinary tensors to stay ordinary
        with torch.inference_mode(False):
            return VirtualTensor(tensor, device)
    return VirtualTensor(tensor, device)


def _operands(args: Sequence[Any]) -> list[torch.Tensor]:
    """The operands of an indexing that must be on one device: indices may be on the host, as with GPUs."""
    return [args[0], *(value for value in args[2:] if isinstance(value, torch.Tensor))]


def _common_device(func: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of the result; operands on several devices are refused, as with GPUs."""
    virtual = dict.fromkeys(tensor._home for tensor in tensors if isinstance(tensor, VirtualTensor))
    if func in _ACROSS_DEVICES:
        return home(tensors[0])
    on_host = [tensor for tensor in tensors if not isinstance(tensor, VirtualTensor) and tensor.dim() > 0]
    if func.overloadpacket in _WITH_LENGTHS:
        on_host = [tensor for tensor in on_host if tensor.is_floating_point() or tensor is tensors[0]]
    host = bool(on_host)
    if len(virtual) > 1 or host:
        names = [str(shown_device(device)) for device in virtual] + (["cpu"] if host else [])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(names[:2])}!"
        )
    return next(iter(virtual))
