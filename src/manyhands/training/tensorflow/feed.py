"""Says which samples a step takes: the data stay in the host's memory, and the rows of a shard go to its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from manyhands.backends.tensorflow import devices as backend
from manyhands.training.data.order import Cursor, Window, epoch_order, undivided, windows
from manyhands.training.data.sources import Array, Arrays, Source, Stream


@dataclass(frozen=True)
class StepInput:
    """One batch as a step takes it: the data, an order of them, and where in it each shard begins and ends."""

    data: tuple[Any, ...]
    order: Any
    bounds: Array


class Feed:
    """Batches of one source, cut into the shards of all replicas of a job."""

    def __init__(self, source: Source, replicas: int, check: Any = None) -> None:
        """``check`` looks at the arrays of every batch of a loader."""
        self.source, self.replicas, self.check = source, replicas, check
        self._data = tuple(map(_on_host, source.arrays)) if isinstance(source, Arrays) else ()

    def batches(
        self, cursor: Cursor, size: int, seed: int, shares: Sequence[float] | None, least: int, *, whole: bool = False
    ) -> Iterator[tuple[Window, StepInput]]:
        """Every batch from the cursor to the end of its epoch; ``whole`` ones are not divided over the replicas."""
        if isinstance(self.source, Stream):
            yield from self._from_stream(self.source, cursor, seed, shares, least, whole=whole)
            return
        count = self.source.count
        order = _on_host(epoch_order(seed, cursor.epoch, count, shuffle=self.source.shuffle))
        for window in windows(cursor, count, size, whole=whole):
            yield window, StepInput(self._data, order, self._bounds(window, window.start, shares, least))

    def _from_stream(
        self, source: Stream, cursor: Cursor, seed: int, shares: Sequence[float] | None, least: int, *, whole: bool
    ) -> Iterator[tuple[Window, StepInput]]:
        for window, arrays in undivided(source.windows(cursor, seed), whole):
            if self.check is not None:
                self.check(source.nested(arrays))
            data = tuple(map(_on_host, (*arrays, np.arange(window.size))))
            yield window, StepInput(data[:-1], data[-1], self._bounds(window, 0, shares, least))

    def _bounds(self, window: Window, first: int, shares: Sequence[float] | None, least: int) -> Array:
        """Where the shards begin, and where the last one ends; the batch itself begins at ``first``."""
        sizes = window.sizes(self.replicas, shares, least=least)
        return first + np.cumsum([0, *sizes], dtype=np.int64)


def _on_host(array: Array) -> Any:
    with tf.device(backend.cpu()):
        return tf.convert_to_tensor(array)
