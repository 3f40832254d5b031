"""The signature of a call: what has to be the same for another call to be run by the same trace.

Two calls share a trace if their arguments have the same structure, their tensors the same shape, strides, dtype and
device, if the same of them share memory, if everything else has the same value or (modules, functions, optimizers) is
the same object, and if PyTorch's modes are the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands import tree
from manyhands.addresses import Same, join
from manyhands.backends.torch import compat
from manyhands.backends.torch.virtual import inside, only_hooks, only_known_functions

_OF_PYTHON = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice, type)
is_grad_enabled = torch.is_grad_enabled
BY_VALUE = (*_OF_PYTHON, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Call:
    """One call's tensors, and what has to be the same for another call to be run in the same way."""

    signature: tuple[Any, ...]
    tensors: list[torch.Tensor]
    shares_memory: bool  # whether two of the tensors do
    # The arguments with other tensors in place of these.
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    leaves, structure = tree.flatten((arguments, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = tuple(_tensor_key(leaf) if isinstance(leaf, torch.Tensor) else _key(leaf) for leaf in leaves)

    def rebuild(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        replacements = iter(values)
        return structure.unflatten(next(replacements) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)  # type: ignore[return-value]

    shares_memory, first = share_memory(tensors), tuple(first_of_each(tensors))
    signature = (structure, known, shares_memory, first, _orders((arguments, keywords)), modes())
    return Call(signature, tensors, shares_memory, rebuild)


def first_of_each(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the number of its first occurrence: code may ask whether two arguments are the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]


def _orders(value: Any) -> tuple[Any, ...]:
    """The order of the keys of dicts: structures compare equal without it, but a loop over a dict depends on it."""
    if isinstance(value, dict):
        inner = [_orders(part) for part in value.values()]
        return (tuple(value), *inner)
    if isinstance(value, (list, tuple)):
        return tuple(order for part in value if (order := _orders(part)))
    return ()


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (Same(tensor),)
    # A parameter is read in place, so one at another address is another call.
    place = tensor.data_ptr() if type(tensor) is nn.Parameter else None
    # Lazy conjugation or negation: the same memory stands for other numbers.
    signs = tensor.is_conj(), tensor.is_neg()
    gradient = tensor.requires_grad and tensor.is_leaf and tensor.grad is not None
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return (type(tensor), *form, *signs, gradient, place)


def _key(leaf: Any) -> Any:
    return (type(leaf), repr(leaf)) if isinstance(leaf, BY_VALUE) else Same(leaf)


def share_memory(values: Sequence[Any]) -> bool:
    """Whether two tensors among these share memory, by address: two ``from_numpy`` of one array share no storage."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    spans = [span for tensor in tensors if (span := compat.span_of(inside(tensor))) is not None]
    return len({id(tensor) for tensor in tensors}) < len(tensors) or len(join(spans)) < len(spans)


def shapes_of(values: Iterable[Any]) -> tuple[torch.Size | None, ...]:
    """The shape of each value; None if it is not a tensor, or a nested one, which has none."""
    return tuple(value.shape if isinstance(value, torch.Tensor) and not value.is_nested else None for value in values)


def modes() -> tuple[Any, ...]:
    """PyTorch's settings that change what an operation does: gradients, autocast, dtypes and devices by default."""
    autocast = compat.is_any_autocast_enabled() and [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in ("cuda", "cpu")
    ]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(autocast) if autocast else None,
        torch.get_default_dtype(),
        compat.default_device.CURRENT_DEVICE,
        torch.get_num_threads(),
        compat.deterministic_algorithms(),
    )


def why_plain() -> str | None:
    """Why PyTorch must see a call as it is written, or None: somebody observes it, or differentiates it."""
    if not only_hooks():
        return "a dispatch mode is active, and it must see every operation"
    if not only_known_functions():
        return "a function mode is active, and it must see every call"
    if compat.forward_ad_level() >= 0 or compat.functorch_level() is not None:
        return "it is called inside a transform (torch.func, forward-mode derivatives)"
    if compat.jit_tracing_state() is not None:
        return "it is called while torch.jit traces"
    if torch.is_anomaly_enabled():
        return "torch.autograd.detect_anomaly() must see every derivative"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "it is called during the capture of a CUDA graph, which cannot contain another one"
    return None
