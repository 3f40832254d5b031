"""Has a Python value changed? A short digest answers that, without a copy of a large value.

Tensors count by their identity and by how often they were written to, which PyTorch counts on the host: a digest of
their numbers would make the host wait for a GPU. Parameters, buffers and modules of the model itself count by name, and
functions and classes by identity. The rest counts by its pickle. For example a moving average that a model keeps::

    {"decay": 0.9, "weight": <tensor 1, written to 3 times>}      before a step
    {"decay": 0.9, "weight": <tensor 1, written to 4 times>}      after it: changed
"""

from __future__ import annotations

import hashlib
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch

from manyhands.backends.torch import compat

_MOST = 32 << 20  # bytes of a pickle: who holds more holds data, not state
NameOf = Callable[[object], str | None]
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


def digest(value: Any, name_of: NameOf, alive: list[object]) -> bytes | None:
    """The digest of a value; None where there is none (it cannot be pickled, or is very large).

    ``name_of`` names what counts by name. What counts by identity is added to ``alive``: while it is alive, no other
    object has its identity.
    """
    file = _Hashing()
    try:
        _Pickler(file, name_of, alive).dump(value)
    except Exception:
        return None
    return file.hash.digest()


class _Hashing(io.RawIOBase):
    """A file that keeps only the digest of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.hash, self.size = hashlib.blake2b(digest_size=16), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.size += len(view)
        if self.size > _MOST:
            raise ValueError("too large")
        self.hash.update(view)
        return len(view)


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, name_of: NameOf, alive: list[object]) -> None:
        super().__init__(file, protocol=5)
        self._name_of, self._alive = name_of, alive

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, torch.nn.Module)) and (name := self._name_of(value)) is not None:
            return name
        if isinstance(value, torch.Tensor):
            self._alive.append(value)
            return id(value), compat.write_count(value)
        if isinstance(value, FUNCTIONS):
            self._alive.append(value)
            return id(value)
        return None
