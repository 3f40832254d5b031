"""Counts every byte that a step holds, by what it is for.

A dispatch mode sees the result of each operation; a storage counts from the operation that makes it until PyTorch frees
it. So the count is that of PyTorch's allocator, without its fragments and without what libraries take for themselves
(workspaces), and works on any device. What a storage is for is known at the end only: those that are gradients by then
were so when they were made. So births and deaths are noted, for :mod:`manyhands.predict.memory_lines`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.predict.memory_lines import History


class MemoryCount(compat.TorchDispatchMode):
    """``with MemoryCount(device) as count: step()``, then :meth:`history`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._step = 512 if device.type == "cuda" else 1  # the allocator's smallest piece
        self._serials = itertools.count()
        self._living: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []  # serial, 1 for birth or -1 for death
        self._watched: dict[int, Any] = {}

    def hold(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Say what these tensors, and all that share their memory, are for; at any time while they live."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                serial = self._see(tensor)
                if serial is not None:
                    self._kinds[serial] = kind

    def history(self, batch: int) -> History:
        """What was held, and when, in the step of so many samples."""
        return History(batch, self._events[:], dict(self._sizes), dict(self._kinds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in compat.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> int | None:
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = compat.storage_id(storage)
        if key in self._living:
            return self._living[key]
        serial = next(self._serials)
        self._living[key] = serial
        self._sizes[serial] = -(-storage.nbytes() // self._step) * self._step
        self._events.append((serial, 1))

        def gone(_: Any) -> None:
            self._events.append((serial, -1))
            self._watched.pop(serial, None)
            if self._living.get(key) == serial:
                del self._living[key]

        self._watched[serial] = weakref.ref(storage, gone)
        return serial
