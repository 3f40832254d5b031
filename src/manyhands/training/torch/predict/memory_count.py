"""Counts every byte that a step holds, by what it is for.

A dispatch mode sees the result of each operation; a storage counts from the operation that makes it until PyTorch frees
it. So the count is that of PyTorch's allocator, without its fragments, and works on any device. What a storage is for
is known at the end only: those that are gradients by then were so when they were made. So births and deaths are noted,
for :mod:`manyhands.predict.memory_lines`.

What an operation takes for itself while it runs (cuDNN's workspace, a copy in another layout) is not the result of any
operation. On a GPU the allocator is asked for its peak during each operation, and what is above the results counts as
workspace of that moment. It must not be added to another moment: a convolution of a small batch may need much of it
while the peak of a large batch is elsewhere.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from manyhands.backends.torch import compat
from manyhands.predict.memory_lines import History


class Allocator(Protocol):
    """A device's allocator: bytes that are held, and their peak since ``reset``."""

    def held(self) -> int: ...

    def reset(self) -> None: ...

    def peak(self) -> int: ...


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class MemoryCount(compat.TorchDispatchMode):
    """``with MemoryCount(device) as count: step()``, then :meth:`history`."""

    def __init__(self, device: torch.device, allocator: Allocator | None = None) -> None:
        """``allocator``: that of the device; on a CPU there is none to ask."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._allocator = allocator or (_Cuda(device) if device.type == "cuda" else None)
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
        """The history of a step with this many samples: what was held, and when."""
        return History(batch, self._events[:], dict(self._sizes), dict(self._kinds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._allocator is None:
            result = func(*args, **(kwargs or {}))
            self._see_all(result)
            return result
        before = self._allocator.held()
        self._allocator.reset()
        result = func(*args, **(kwargs or {}))
        most = self._allocator.peak() - before
        results = sum(self._sizes[serial] for serial in self._see_all(result))
        self._note_workspace(max(0, most - results))
        return result

    def _note_workspace(self, size: int) -> None:
        """Record the workspace of one operation, also an empty one: steps of all batch sizes need the same events."""
        serial = next(self._serials)
        self._sizes[serial], self._kinds[serial] = size, "workspace"
        self._events += [(serial, 1), (serial, -1)]

    def _see_all(self, result: Any) -> list[int]:
        """The numbers of the storages that are new."""
        first = len(self._sizes)
        seen = [self._see(leaf) for leaf in compat.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return (
            []
            if len(self._sizes) == first
            else sorted({serial for serial in seen if serial is not None and serial >= first})
        )

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
