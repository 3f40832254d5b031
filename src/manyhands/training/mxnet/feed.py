"""Brings each batch's shards to their devices: cut on the host and copied.

MXNet's engine orders the copies before what uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from manyhands.training.data.order import Cursor, Window, epoch_order, undivided, windows
from manyhands.training.data.sources import Batch, Source, Stream
from manyhands.training.mxnet import replicas

Shards = list[Batch | None]  # one per device; None where it has no samples
Look = Callable[[Sequence[NDArray[Any]]], None]


class Feed:
    """The shards of a source for a list of devices. ``look`` checks a stream's batches before they go to a device."""

    def __init__(
        self, source: Source, devices: Sequence[mx.Context], dtype: Any, *, least: int = 1, look: Look | None = None
    ) -> None:
        self.source, self.devices, self.dtype, self.least, self.look = source, list(devices), dtype, least, look

    def batches(
        self, cursor: Cursor, size: int, seed: int, shares: Sequence[float] | None = None, *, whole: bool = False
    ) -> Iterator[tuple[Window, Shards]]:
        """Every batch from the cursor to the end of its epoch, as shards; ``whole`` ones are not divided.

        Arrays come in batches of that size, a loader has its own.
        """
        source = self.source
        if isinstance(source, Stream):
            for window, batch in undivided(source.windows(cursor, seed), whole):
                if self.look is not None:
                    self.look(batch)
                yield window, self._divided(window, shares, batch, np.arange(window.size))
            return
        order = epoch_order(seed, cursor.epoch, source.count, shuffle=source.shuffle)
        for window in windows(cursor, source.count, size, whole=whole):
            yield window, self._divided(window, shares, source.arrays, order[window.start : window.stop])

    def _divided(self, window: Window, shares: Sequence[float] | None, parts: Batch, rows: NDArray[np.int64]) -> Shards:
        """A shard of these rows for each device; None where it has no samples."""
        ends = np.cumsum([0, *window.sizes(len(self.devices), shares, least=self.least)])
        return [
            self._sent([part[rows[begin:end]] for part in parts], device) if end > begin else None
            for device, begin, end in zip(self.devices, ends, ends[1:], strict=False)
        ]

    def _sent(self, rows: Sequence[NDArray[Any]], device: mx.Context) -> Batch:
        """Floating-point numbers in the model's dtype: MXNet computes with nothing else."""
        shard = self.source.prepare(tuple(replicas.native(part, device) for part in rows))
        return tuple(
            part.astype(self.dtype) if "float" in np.dtype(part.dtype).name and part.dtype != self.dtype else part
            for part in shard
        )
