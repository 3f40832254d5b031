"""Classifies the values that a function reaches: whose code it is, and how to detect that its content changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from manyhands.errors import CannotTrace

_OPAQUE = {
    "torch",
    "numpy",
    "optree",
    "builtins",
    "functools",
    "collections",
    "dataclasses",
    "typing",
    "typing_extensions",
}
_MANY = 100_000  # the largest array that is compared before every call, in numbers


def content_of(value: Any) -> Callable[[Any], Any] | None:
    """A function that copies the content of a set or an array, for comparison; None for other values."""
    if isinstance(value, set):
        return frozenset
    if isinstance(value, bytearray):
        return bytes
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        if value.size > _MANY:
            raise CannotTrace(
                f"it uses a NumPy array of {value.size} numbers, too many to compare before every call: make it a "
                "tensor (torch.from_numpy), which a plan reads afresh"
            )
        return numpy.ndarray.tobytes  # type: ignore[no-any-return]
    return None


def is_opaque(value: Any) -> bool:
    """Whether a class or function is of PyTorch, NumPy, Python or manyhands: it is not followed."""
    module = str(getattr(value, "__module__", "") or "")
    if module.startswith(("manyhands.schedule", "manyhands.tasks", "manyhands.parallel", "manyhands.backends")):
        return True
    return module.partition(".")[0] in _OPAQUE


def is_odd(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, nn.Parameter) and not isinstance(tensor, nn.Parameter)
