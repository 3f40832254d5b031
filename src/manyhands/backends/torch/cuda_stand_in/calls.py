"""Calls that mean GPUs: ``x.cuda(1)``, ``x.pin_memory()``, ``autocast("cuda")``, ``torch.load``, ``DataParallel``'s.

What ``DataParallel`` sends and sums is C++ for CUDA alone in PyTorch. These functions do the same: a tensor that is
already on its device is not copied (so the first replica updates BatchNorm's statistics of the model itself), and sums
are in the order of the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.compat import tree_map_only
from manyhands.backends.torch.cuda_stand_in.streams import index_of

# A number alone means a device of the accelerator that PyTorch was built for, which is not there.


def device(*args: Any, **kwargs: Any) -> torch.device:
    """``torch.device(1)`` and ``torch.device(device=1)``."""
    return torch.device(*map(_by_name, args[:1]), *args[1:], **_with_named(kwargs))


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """``net.to(1)`` and ``net.to(device=1)``."""
    return compat.parse_to(*map(_by_name, args[:1]), *args[1:], **_with_named(kwargs))


def _with_named(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "device": _by_name(options["device"])} if "device" in options else options


def _by_name(device: Any) -> Any:
    return f"cuda:{device}" if type(device) is int else device


def cuda(
    tensor: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """``x.cuda(1)``: x itself if it is already there."""
    target = virtual.actual("cuda" if device is None else device)
    if not virtual.is_virtual(target):
        raise ValueError(f"Invalid device, must be cuda device, not {target}")
    with virtual.NameTranslation():  # PyTorch switches function modes off while it calls this
        return tensor.to(target, non_blocking=non_blocking, memory_format=memory_format)


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy marked as page-locked: host and virtual devices share memory, so there is nothing to gain."""
    if isinstance(tensor, virtual.VirtualTensor):
        raise RuntimeError(f"cannot pin a tensor of {tensor.device}: only dense CPU tensors can be pinned")
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    virtual.mark_pinned(copy)
    return copy


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return virtual.is_marked_pinned(tensor)


def type_name(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **more: Any) -> Any:
    """``x.type()`` and ``x.type("torch.cuda.FloatTensor")``."""
    if dtype is None:
        name = str(virtual.inside(tensor).type())
        return name.replace("torch.", "torch.cuda.", 1) if tensor.is_cuda else name
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        return cuda(tensor).to(getattr(torch, dtype.rpartition(".")[2]).dtype)
    if isinstance(dtype, str):  # a type of the host
        return tensor.cpu().type(dtype)
    return tensor.type(dtype)


def on_cpu_too(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``autocast("cuda")`` also casts what virtual devices compute, which the dispatcher knows as CPU operations."""

    def enter_both(context: Any) -> Any:
        if context.device == "cuda" and virtual.stands_in():
            # An unbound call: `enter` is what is replaced here.
            beside = compat.autocast_like(context, "cpu")
            enter(beside)
            vars(context).setdefault("_beside", []).append(beside)
        return enter(context)

    return enter_both


def off_cpu_too(leave: Callable[..., Any]) -> Callable[..., Any]:
    def leave_both(context: Any, *error: Any) -> Any:
        result = leave(context, *error)
        if vars(context).get("_beside"):
            leave(context._beside.pop(), *error)
        return result

    return leave_both


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load(file, map_location="cuda:1")``: a file is read on the host, then its tensors are moved."""

    def load_here(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:  # saved on a GPU, perhaps: PyTorch would look for it
            return load(f, "cpu", *args, **kwargs)
        target = virtual.actual(map_location) if isinstance(map_location, (str, torch.device)) else None
        if target is None or not virtual.is_virtual(target):
            return load(f, map_location, *args, **kwargs)
        kinds = (torch.Tensor, torch.nn.Module)
        return tree_map_only(kinds, lambda loaded: loaded.to(target), load(f, "cpu", *args, **kwargs))

    return load_here


def refusing_ddp(init: Callable[..., None]) -> Callable[..., None]:
    """``DistributedDataParallel`` reads gradients in C++, where virtual tensors have no memory."""

    def init_on_host(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(parameter, virtual.VirtualTensor) for parameter in module.parameters()):
            raise RuntimeError(
                "DistributedDataParallel cannot use virtual devices: its ranks are processes, each with the CPU for "
                "itself. Leave the net on the CPU and give no device_ids (Gloo), or train with "
                "mh.Trainer(num_gpus=2), which starts the processes itself"
            )
        init(self, module, *args, **kwargs)

    return functools.wraps(init)(init_on_host)


def profiling_the_host(init: Callable[..., None]) -> Callable[..., None]:
    """``torch.profiler`` with ``ProfilerActivity.CUDA``: virtual devices compute on the host, whose times it shows."""

    def init_for_host(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "use_cuda": False, "use_device": None})

    return functools.wraps(init)(init_for_host)


class _GeneratorType(type):
    """Keeps ``isinstance(g, torch.Generator)`` working."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PlainGenerator)


_PlainGenerator = torch.Generator


class Generator(metaclass=_GeneratorType):
    """``torch.Generator(device="cuda")``: random numbers of virtual devices are drawn on the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        target = virtual.actual(device)
        return _PlainGenerator("cpu" if virtual.is_virtual(target) else target)


def wrap_initialize(initialize: Callable[[], None], has_gpu: bool) -> Callable[[], None]:
    """Replaces what PyTorch calls before it first uses CUDA. In a hooked thread the hooks handle what follows."""

    def initialize_virtual() -> None:
        if not virtual.is_hooked():
            raise RuntimeError(
                "this operation asks CUDA itself for a GPU, and there are only virtual devices. If it runs in a thread "
                "that was started before the virtual devices were made, start the thread later; else it is one that "
                "they cannot do (docs/virtual-devices.md)"
            )
        if has_gpu:  # PyTorch initialises CUDA only once
            initialize()

    return initialize_virtual


# What DataParallel sends and sums


def _on(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    where = torch.device("cpu") if device in ("cpu", -1) else virtual.device(index_of(device))
    return virtual.place(tensor, where)


def broadcast(
    tensor: torch.Tensor, devices: Iterable[Any] | None = None, *, out: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    _one_of("devices", devices, out)
    if out is not None:
        return tuple(target.copy_(tensor) for target in out)
    return tuple(_on(tensor, device) for device in devices or ())


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Iterable[Any], buffer_size: int = 0
) -> list[list[torch.Tensor]]:
    # As PyTorch does it: complex tensors as pairs of real numbers.
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return [[_on(real.detach(), device) for real in plain] for device in devices]


def reduce_add(inputs: Sequence[torch.Tensor], destination: Any = None) -> torch.Tensor:
    if len({tensor.shape for tensor in inputs}) > 1:
        raise ValueError(f"tensors of different shapes cannot be added: {[tuple(tensor.shape) for tensor in inputs]}")
    total = _on(inputs[0], destination)
    for tensor in inputs[1:]:
        total = total + _on(tensor, destination)
    return total


def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: Any = None, buffer_size: int = 0
) -> tuple[torch.Tensor, ...]:
    return tuple(reduce_add(tensors, destination) for tensors in zip(*inputs, strict=True))


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    _one_of("devices", devices, out)
    if out is not None:
        parts = tensor.split([target.shape[dim] for target in out], dim)
        return tuple(target.copy_(part) for target, part in zip(out, parts, strict=True))
    devices = list(devices or ())
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return tuple(_on(part, device) for part, device in zip(parts, devices, strict=False))  # few rows give fewer chunks


def gather(
    tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    _one_of("destination", destination, out, needed=False)
    parts = [_on(tensor, out.device.index if out is not None else destination) for tensor in tensors]
    with torch.autocast("cpu", enabled=False):  # replicas may compute in another precision than the caller's
        whole = torch.cat(parts, dim)
    return whole if out is None else out.copy_(whole)


def _one_of(name: str, value: object, out: object, *, needed: bool = True) -> None:
    if (value is not None and out is not None) or (needed and value is None and out is None):
        raise RuntimeError(f"give either '{name}' or 'out', not {'both' if value is not None else 'neither'}")


def scatter_forward(ctx: Any, target_gpus: Any, chunk_sizes: Any, dim: int, input: torch.Tensor) -> Any:
    """``Scatter.forward`` of ``DataParallel`` without its copy streams: these need ``torch.device(1)``, which PyTorch
    only has for accelerators that it was built for."""
    target_gpus = [index_of(device) for device in target_gpus]
    ctx.dim = dim
    ctx.input_device = input.get_device() if input.is_cuda else -1
    plain = torch.view_as_real(input) if input.is_complex() else input
    outputs = scatter(plain, target_gpus, chunk_sizes, dim)
    return tuple(map(torch.view_as_complex, outputs)) if input.is_complex() else outputs
