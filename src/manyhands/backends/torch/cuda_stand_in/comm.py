"""``torch.nn.parallel.comm`` over virtual devices: what ``DataParallel`` sends and sums.

PyTorch's own functions are C++ for CUDA alone. These do the same with tensors: a tensor that is already on its device
is not copied (so the first replica updates BatchNorm's statistics of the model itself), and sums are in the order of
the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from manyhands.backends.torch import virtual
from manyhands.backends.torch.cuda_stand_in.streams import index_of


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
