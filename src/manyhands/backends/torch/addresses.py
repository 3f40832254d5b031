"""The addresses of tensors: the memory of their whole storage, and the part of it that they show."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.addresses import Span
from manyhands.backends.torch.virtual import VirtualTensor


def span_of(value: Any) -> Span | None:
    """All of the memory that a tensor lies in, not only what it shows of it; None for what has none of its own."""
    tensor = value._inner if isinstance(value, VirtualTensor) else value
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor of torch.func, or a made-up one
        return None
    return Span(start, start + size) if start and size else None


def reach(tensor: torch.Tensor) -> int:
    """How many numbers lie in memory from a tensor's first one to its last one, which may have gaps between them."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
