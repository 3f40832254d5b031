"""Copies of results, in memory that belongs to the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat


def copied(values: Sequence[Any], *, sharing: bool = True) -> list[Any]:
    """Copies of the values. A tensor that occurs twice stays one tensor; tensors that share memory share it again.

    ``sharing``: whether tensors may occur twice or share memory.
    """
    tensors = {id(value): value.detach() for value in values if isinstance(value, torch.Tensor)}
    copies: dict[int, torch.Tensor] = {}
    by_form: dict[Any, list[int]] = {}
    for keys in _sharing(tensors) if sharing else ():
        storage = tensors[keys[0]].untyped_storage().clone()
        for key in keys:
            tensor = tensors[key]
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies[key] = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    for key, value in tensors.items():
        if key in copies:
            continue
        if value.device.type == "cuda":
            by_form.setdefault((value.device, value.dtype), []).append(key)
        else:
            copies[key] = value.clone()
    for keys in by_form.values():
        fresh = [torch.empty_like(tensors[key]) for key in keys]
        compat.foreach_copy_(fresh, [tensors[key] for key in keys])  # one kernel for all
        copies.update(zip(keys, fresh, strict=True))
    return [copies[id(value)] if isinstance(value, torch.Tensor) else value for value in values]


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill contiguous memory, each once, in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def allocator(values: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """A function that allocates new tensors with the shapes, strides and dtypes of these, which are on one GPU."""
    like = [torch.empty_like(value, device="meta") for value in values]
    forms = [(tuple(form.shape), form.stride(), form.dtype) for form in like]
    empty = _empty(values[0].device)
    return lambda: [empty(size, stride, dtype) for size, stride, dtype in forms]


def _empty(device: torch.device) -> Callable[..., torch.Tensor]:
    """An allocation function; on the current device, the fast one that PyTorch has for its compiled code."""
    quick = compat.empty_strided_cuda
    if quick is not None and torch.cuda.device_count() == 1:
        return quick  # type: ignore[no-any-return]
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _sharing(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Groups of tensors that share memory; only plain strided tensors without a conjugate or negative bit."""
    groups: dict[int, list[int]] = {}
    for key, tensor in tensors.items():
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(compat.memory_id(tensor), []).append(key)
    shared = [keys for keys in groups.values() if len(keys) > 1]
    return [keys for keys in shared if not any(tensors[key].is_conj() or tensors[key].is_neg() for key in keys)]
