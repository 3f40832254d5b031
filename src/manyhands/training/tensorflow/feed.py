"""Brings the samples of a step to the devices: from arrays resident on each device, or from the host.

On GPUs whole arrays are copied once to each device, if they fit there well; a step then sends only where its shards
begin and end. On CPU devices they stay where they are, in the host's memory, and so does a loader's batch: the rows of
a shard go to its device, and only they.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from manyhands.backends.tensorflow import devices as backend
from manyhands.training.data.order import Cursor, Window, epoch_order, undivided, windows
from manyhands.training.data.sources import Array, Arrays, Source, Stream

_PART = 0.25  # of a GPU's memory that data may take


@dataclass(frozen=True)
class StepInput:
    """One batch as a step takes it: the data, an order of them, and where in it each shard begins and ends."""

    data: tuple[Any, ...]
    order: Any
    bounds: Array


class Feed:
    """Batches of one source, cut into the shards of all replicas of a job."""

    def __init__(self, source: Source, strategy: Any, devices: Sequence[Any], check: Any = None) -> None:
        """``check`` looks at the arrays of every batch of a loader, on the host."""
        self.source, self.strategy, self.devices, self.check = source, strategy, devices, check
        self.on_host = not (isinstance(source, Arrays) and _fits(source, devices))
        self._data: tuple[Any, ...] = ()
        if isinstance(source, Arrays):
            self._data = tuple(map(self._placed, source.arrays))

    def batches(
        self, cursor: Cursor, size: int, seed: int, shares: Sequence[float] | None, least: int, *, whole: bool = False
    ) -> Iterator[tuple[Window, StepInput]]:
        """Every batch from the cursor to the end of its epoch; ``whole`` ones are not divided over the replicas."""
        replicas: int = self.strategy.num_replicas_in_sync
        if isinstance(self.source, Stream):
            yield from self._from_stream(self.source, cursor, seed, shares, least, whole=whole)
            return
        count = self.source.count
        order = self._placed(epoch_order(seed, cursor.epoch, count, shuffle=self.source.shuffle))
        for window in windows(cursor, count, size, whole=whole):
            yield window, StepInput(self._data, order, _bounds(window, window.start, replicas, shares, least))

    def _from_stream(
        self, source: Stream, cursor: Cursor, seed: int, shares: Sequence[float] | None, least: int, *, whole: bool
    ) -> Iterator[tuple[Window, StepInput]]:
        replicas: int = self.strategy.num_replicas_in_sync
        for window, arrays in undivided(source.windows(cursor, seed), whole):
            if self.check is not None:
                self.check(source.nested(arrays))
            data = tuple(map(self._placed, (*arrays, np.arange(window.size))))
            yield window, StepInput(data[:-1], data[-1], _bounds(window, 0, replicas, shares, least))

    def _placed(self, array: Array) -> Any:
        with tf.device(backend.cpu()):
            on_host = tf.convert_to_tensor(array)
        if self.on_host:
            return on_host
        copies = iter([backend.move(on_host, device) for device in self.devices])
        return self.strategy.experimental_distribute_values_from_function(lambda _: next(copies))


def _bounds(window: Window, first: int, replicas: int, shares: Sequence[float] | None, least: int) -> Array:
    """Where the shards begin, and where the last one ends; the batch itself begins at ``first``."""
    sizes = window.sizes(replicas, shares, least=least)
    return first + np.cumsum([0, *sizes], dtype=np.int64)


def _fits(source: Arrays, devices: Sequence[Any]) -> bool:
    """Whether every device is a GPU with much more memory than the data need; TensorFlow takes all of it for itself."""
    if any(backend.neutral(device).kind != "gpu" for device in devices):
        return False
    memory = [backend.describe(device).memory for device in devices]
    return all(record is not None and source.nbytes < record.total * _PART for record in memory)
