"""Results in memory of the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def copied(values: Sequence[Any], *, sharing: bool = True) -> list[Any]:
    """The same values in memory of their own; what was one tensor stays one, what shared memory shares it again.

    ``sharing``: whether there may be any of these.
    """
    if not sharing and values and all(type(value) is torch.Tensor and value.is_cuda for value in values):
        return _clones(values)
    tensors = {id(value): value.detach() for value in values if isinstance(value, torch.Tensor)}
    made: dict[int, torch.Tensor] = {}
    alike: dict[Any, list[int]] = {}
    for keys in _sharing(tensors) if sharing else ():
        storage = tensors[keys[0]].untyped_storage().clone()
        for key in keys:
            one = tensors[key]
            empty = torch.empty(0, dtype=one.dtype, device=one.device)
            made[key] = empty.set_(storage, one.storage_offset(), one.shape, one.stride())
    for key, value in tensors.items():
        if key in made:
            continue
        if value.device.type == "cuda":
            alike.setdefault((value.device, value.dtype), []).append(key)
        else:
            made[key] = value.clone()
    for keys in alike.values():
        fresh = [torch.empty_like(tensors[key]) for key in keys]
        torch._foreach_copy_(fresh, [tensors[key] for key in keys])  # one kernel for all
        made.update(zip(keys, fresh, strict=True))
    return [made[id(value)] if isinstance(value, torch.Tensor) else value for value in values]


def _clones(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of tensors on GPUs, with as little work for the host as there can be: this is done at every call."""
    device, dtype = values[0].device, values[0].dtype
    if any(value.dtype is not dtype or value.device != device for value in values):
        return [value.clone() for value in values]
    fresh = [torch.empty_like(value) for value in values]
    torch._foreach_copy_(fresh, list(values))  # one kernel for all
    return fresh


def _sharing(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Those that share memory with others, together; what has more to it than a place in memory is left out."""
    groups: dict[int, list[int]] = {}
    for key, tensor in tensors.items():
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(key)
    shared = [keys for keys in groups.values() if len(keys) > 1]
    return [keys for keys in shared if not any(tensors[key].is_conj() or tensors[key].is_neg() for key in keys)]
