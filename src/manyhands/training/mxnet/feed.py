"""Brings each batch's shards to their devices.

Arrays that fit live on every device: a shard is a gather there, and the host has nothing to do but to say which rows.
Everything else is cut on the host and copied; MXNet's engine orders the copies before what uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from manyhands.backends.mxnet import devices as backend
from manyhands.training.data.order import Cursor, Window, epoch_order, undivided, windows
from manyhands.training.data.sources import Arrays, Batch, Source, Stream
from manyhands.training.mxnet import replicas

Shards = list[Batch | None]  # one per device; None where it has no samples
Look = Callable[[Sequence[NDArray[Any]]], None]
Rows = Callable[[int, int, int], Batch]  # of a device's number, and where its shard begins and ends


class Feed:
    """The shards of a source for a list of devices. ``look`` checks a stream's batches before they go to a device."""

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
            self.on_devices = [tuple(replicas.native(array, device) for array in source.arrays) for device in devices]

    def batches(
        self,
        cursor: Cursor,
        size: int,
        seed: int,
        shares: Sequence[float] | None = None,
        *,
        shuffle: bool = False,
        whole: bool = False,
    ) -> Iterator[tuple[Window, Shards]]:
        """Every batch from the cursor to the end of its epoch, as shards; ``whole`` ones are not divided.

        Arrays come in batches of that size, a loader has its own.
        """
        if isinstance(self.source, Stream):
            for window, batch in undivided(self.source.windows(cursor, seed), whole):
                if self.look is not None:
                    self.look(batch)
                yield window, self._divided(window, shares, partial(self._cut, batch, window.start))
            return
        order = epoch_order(seed, cursor.epoch, self.source.count, shuffle=shuffle)
        rows: Rows = partial(self._sent, order)
        if self.on_devices is not None:
            rows = partial(self._gathered, [replicas.native(order.astype(np.int32), device) for device in self.devices])
        for window in windows(cursor, self.source.count, size, whole=whole):
            yield window, self._divided(window, shares, rows)

    def _divided(self, window: Window, shares: Sequence[float] | None, rows: Rows) -> Shards:
        """A shard for each device; None where it has no samples."""
        count = len(self.devices)
        parts = [window.part(index, count, shares, least=self.least) for index in range(count)]
        return [rows(index, begin, end) if end > begin else None for index, (begin, end) in enumerate(parts)]

    # The rows of a device's shard, between two places of the epoch's order

    def _cut(self, batch: Sequence[NDArray[Any]], start: int, index: int, begin: int, end: int) -> Batch:
        device = self.devices[index]
        return self._cast(tuple(replicas.native(part[begin - start : end - start], device) for part in batch))

    def _gathered(self, orders: Sequence[Any], index: int, begin: int, end: int) -> Batch:
        assert self.on_devices is not None
        numbers = orders[index][begin:end]
        return self._prepared(tuple(replicas.take(array, numbers) for array in self.on_devices[index]))

    def _sent(self, order: NDArray[np.int64], index: int, begin: int, end: int) -> Batch:
        assert isinstance(self.source, Arrays)
        device = self.devices[index]
        return self._prepared(tuple(replicas.native(row, device) for row in self.source.rows(order[begin:end])))

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
