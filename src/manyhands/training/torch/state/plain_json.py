"""Python values as JSON, with their tensors beside it; only types that can be rebuilt without running code from a file.

Numbers, texts and None are themselves. Everything else is an object with one entry, its kind::

    {"decay": 0.9, "seen": (1, 2)}     ->  {"dict": [["decay", 0.9], ["seen", {"tuple": [1, 2]}]]}
    [tensor(...)]                      ->  {"list": [{"tensor": ["0", true]}]}     true: it was on the host
    a long list of floats              ->  {"numbers": "1"}                        the name of a tensor
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from manyhands.errors import type_in_words

_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque}
_LONG = 100
_KINDS = {kind: name for name, kind in _COLLECTIONS.items()}


def encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON; its tensors are added to ``tensors`` by name. A TypeError says what has no form in JSON."""
    if type(value) in (bool, int, str, type(None)):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if (numbers := _as_numbers(value)) is not None:
        return {"numbers": _added(numbers, tensors)}
    if type(value) in _KINDS and not (type(value) is deque and value.maxlen is not None):
        return {_KINDS[type(value)]: [encode(entry, tensors) for entry in value]}
    if type(value) is deque:
        return {"bounded": [value.maxlen, [encode(entry, tensors) for entry in value]]}
    if type(value) is dict:
        return {"dict": [[encode(key, tensors), encode(entry, tensors)] for key, entry in value.items()]}
    if type(value) in (torch.Tensor, np.ndarray):
        tensor = torch.as_tensor(value)  # NumPy's own kinds of numbers that PyTorch does not have are a TypeError
        name = _added(tensor, tensors)
        return {"array": name} if isinstance(value, np.ndarray) else {"tensor": [name, tensor.device.type == "cpu"]}
    raise TypeError(f"{type_in_words(value)} has no form in JSON")


def _added(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def _as_numbers(value: Any) -> torch.Tensor | None:
    """A long list of numbers as a tensor: a history of losses grows and grows."""
    if type(value) is not list or len(value) < _LONG:
        return None
    if all(type(entry) is float for entry in value):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value) if all(type(entry) is int and abs(entry) < 2**62 for entry in value) else None


def decode(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """The value of :func:`encode`; tensors that were not on the host are put on ``device``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {decode(key, tensors, device): decode(entry, tensors, device) for key, entry in content}
    if kind == "bounded":
        return deque([decode(entry, tensors, device) for entry in content[1]], content[0])
    if kind == "numbers":
        return tensors[content].tolist()
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tensor":
        return tensors[content[0]] if content[1] else tensors[content[0]].to(device)
    return _COLLECTIONS[kind](decode(entry, tensors, device) for entry in content)
