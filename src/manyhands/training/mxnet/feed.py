"""Brings each batch's shards to their devices: cut on the host and copied.

MXNet's engine orders the copies before what uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from manyhands.training.data.order import Cursor, Window, epoch_order, undivided, windows
from manyhands.training.data.sources import Arrays, Batch, Source, Stream
from manyhands.training.mxnet import replicas

Shards = list[Batch | None]  # one per device; None where it has no samples
Look = Callable[[Sequence[NDArray[Any]]], None]
Rows = Callable[[int, int], Sequence[NDArray[Any]]]  # of a shard, by where in the epoch's order it begins and ends


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
                yield window, self._divided(window, shares, partial(_cut, batch, window.start))
            return
        order, arrays = epoch_order(seed, cursor.epoch, self.source.count, shuffle=shuffle), self.source
        for window in windows(cursor, self.source.count, size, whole=whole):
            yield window, self._divided(window, shares, lambda begin, end: arrays.rows(order[begin:end]))

    def _divided(self, window: Window, shares: Sequence[float] | None, rows: Rows) -> Shards:
        """A shard for each device; None where it has no samples."""
        count = len(self.devices)
        parts = [window.part(index, count, shares, least=self.least) for index in range(count)]
        return [
            self._sent(rows(begin, end), device) if end > begin else None
            for device, (begin, end) in zip(self.devices, parts, strict=True)
        ]

    def _sent(self, rows: Sequence[NDArray[Any]], device: mx.Context) -> Batch:
        """Floating-point numbers in the model's dtype: MXNet computes with nothing else."""
        shard = tuple(replicas.native(part, device) for part in rows)
        if isinstance(self.source, Arrays):
            shard = self.source.prepare(shard)
        return tuple(
            part.astype(self.dtype) if "float" in np.dtype(part.dtype).name and part.dtype != self.dtype else part
            for part in shard
        )


def _cut(batch: Sequence[NDArray[Any]], start: int, begin: int, end: int) -> Sequence[NDArray[Any]]:
    return [part[begin - start : end - start] for part in batch]
