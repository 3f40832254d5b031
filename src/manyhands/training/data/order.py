"""The one global order of samples, and the cursor that says where in it a job stands.

The order of an epoch is a pure function of (seed, epoch, number of samples): every process computes it
alone, on any number of devices and in any framework, and gets the same. A batch is a window of it, a
shard a window of the batch. So a job that stopped at a cursor resumes there, also on another number of
devices, and sees each sample of the epoch once.

The order is that of random 64-bit keys, one per sample, sorted: the raw stream of NumPy's Philox generator is
fixed by its specification, while its ``permutation`` may change from release to release.

Ten samples, batch 4, three devices: windows 0-4, 4-8, 8-10; the last is cut into 8-9, 9-10 and nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands import shares as _shares

B = TypeVar("B")


def epoch_order(seed: int, epoch: int, count: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """The numbers 0 to ``count - 1`` in the order in which the epoch visits them."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def spread(count: int, few: int) -> NDArray[np.int64]:
    """A few of the numbers 0 to ``count - 1``, evenly spread from the first to the last."""
    return np.linspace(0, count - 1, min(few, count)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a job is: the epoch, the samples and batches of it that are done, and all steps so far.

    With a loader also the digest of the batches that are done, and that of the newest epoch's first batch
    (:mod:`.loader_batches`).
    """

    epoch: int = 0
    sample: int = 0
    batch: int = 0
    step: int = 0
    digest: int | None = None
    first_batch: int | None = None

    def after(self, window: Window) -> Cursor:
        """Where the job stands when that batch is done."""
        first = self.first_batch if self.batch else window.digest
        return Cursor(self.epoch, window.stop, self.batch + 1, window.step + 1, window.digest, first)

    def next_epoch(self) -> Cursor:
        return Cursor(self.epoch + 1, 0, 0, self.step, None, self.first_batch)


@dataclass(frozen=True, slots=True)
class Window:
    """One batch: the samples at ``start`` to ``stop`` of an epoch's order, and the number of its step.

    Of a loader's batch also the digest of the epoch's batches up to this one (:mod:`.loader_batches`). A ``whole``
    batch is not divided: the devices take turns.
    """

    epoch: int
    start: int
    stop: int
    step: int
    digest: int | None = None
    whole: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    def sizes(self, world: int, shares: Sequence[float] | None = None, *, least: int = 1) -> list[int]:
        """How many samples each rank's shard has: none, or at least that many."""
        if self.whole:
            return [self.size if rank == self.step % world else 0 for rank in range(world)]
        return _shares.sizes(self.size, world, shares, least=least)

    def part(self, rank: int, world: int, shares: Sequence[float] | None = None, *, least: int = 1) -> tuple[int, int]:
        """Where in the epoch's order one rank's shard begins and ends; it has no samples, or at least that many."""
        sizes = self.sizes(world, shares, least=least)
        begin = self.start + sum(sizes[:rank])
        return begin, begin + sizes[rank]


def windows(cursor: Cursor, count: int, batch_size: int, *, whole: bool = False) -> Iterator[Window]:
    """The batches from the cursor to the end of its epoch; the last may be short."""
    step = cursor.step
    for start in range(cursor.sample, count, batch_size):
        yield Window(cursor.epoch, start, min(start + batch_size, count), step, whole=whole)
        step += 1


def undivided(
    pairs: Iterable[tuple[Window, B]], whole: bool | Callable[[B], bool] = True
) -> Iterator[tuple[Window, B]]:
    """The same batches, marked as whole; ``whole`` may be a function that picks batches."""
    for window, batch in pairs:
        is_whole = whole if isinstance(whole, bool) else whole(batch)
        yield (replace(window, whole=True) if is_whole else window), batch
