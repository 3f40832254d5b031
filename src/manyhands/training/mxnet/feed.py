"""Brings each batch's shards to their devices.

Arrays that fit live on every device: a shard is a gather there, and the host has nothing to do but to say which rows.
Everything else is cut on the host and copied; MXNet's engine orders the copies before what uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from manyhands.backends.mxnet import devices as backend
from manyhands.training.data.order import Cursor, Window, undivided
from manyhands.training.data.sources import Arrays, Batch, Source, Stream
from manyhands.training.mxnet import modes

Shards = list[Batch | None]  # one per device; None where it has no samples
Look = Callable[[Sequence[NDArray[Any]]], None]


class Feed:
    """The shards of a source for a list of devices. ``look`` sees what a stream gives before it goes to a device."""

    def __init__(
        self,
        source: Source,
        devices: Sequence[mx.Context],
        dtype: Any,
        *,
        least: int = 1,
        look: Look | None = None,
    ) -> None:
        self.source, self.devices, self.dtype, self.least, self.look = source, list(devices), dtype, least, look
        self.on_devices: list[tuple[Any, ...]] | None = None
        if isinstance(source, Arrays) and _fits(source, devices):
            self.on_devices = [tuple(modes.native(array, device) for array in source.arrays) for device in devices]

    def shards(
        self, windows: Sequence[Window], order: NDArray[np.int64] | None, shares: Sequence[float] | None
    ) -> Iterator[tuple[Window, Shards]]:
        """The shards of every window of arrays, in an order (None: as they stand)."""
        assert isinstance(self.source, Arrays)
        if order is None:
            order = np.arange(self.source.count)
        numbers = [modes.native(order.astype(np.int32), device) for device in self.devices] if self.on_devices else None
        for window in windows:
            shards: Shards = []
            for index, device in enumerate(self.devices):
                start, stop = window.part(index, len(self.devices), shares, least=self.least)
                if start == stop:
                    shards.append(None)
                elif self.on_devices is not None and numbers is not None:
                    here = numbers[index][start:stop]
                    shards.append(
                        self._prepared(tuple(modes.take(on_device, here) for on_device in self.on_devices[index]))
                    )
                else:
                    rows = self.source.rows(order[start:stop])
                    shards.append(self._prepared(tuple(modes.native(row, device) for row in rows)))
            yield window, shards

    def stream(
        self, cursor: Cursor, shares: Sequence[float] | None, seed: int, *, whole: bool = False
    ) -> Iterator[tuple[Window, Shards]]:
        """The batches that a loader gives, cut into shards or ``whole``, each with its window."""
        assert isinstance(self.source, Stream)
        for window, batch in undivided(self.source.windows(cursor, seed), whole):
            if self.look is not None:
                self.look(batch)
            shards: Shards = []
            for index, device in enumerate(self.devices):
                begin, end = window.part(index, len(self.devices), shares, least=self.least)
                rows = slice(begin - window.start, end - window.start)
                cut = tuple(modes.native(part[rows], device) for part in batch)
                shards.append(self._cast(cut) if end > begin else None)
            yield window, shards

    def _prepared(self, rows: Batch) -> Batch:
        assert isinstance(self.source, Arrays)
        return self._cast(self.source.prepare(rows))

    def _cast(self, batch: Batch) -> Batch:
        """Floating-point numbers in the model's dtype: MXNet computes with nothing else."""
        return tuple(
            part.astype(self.dtype) if "float" in np.dtype(part.dtype).name and part.dtype != self.dtype else part
            for part in batch
        )


def _fits(source: Arrays, devices: Sequence[mx.Context]) -> bool:
    """Whether a copy for each device takes less than half of the memory that is free there."""
    in_host = sum(device.device_type != "gpu" for device in devices)
    for device in devices:
        memory = backend.describe(device).memory
        copies = in_host if device.device_type != "gpu" else 1
        if memory is None or memory.free is None or source.nbytes * copies > memory.free // 2:
            return False
    return source.count < 2**31
