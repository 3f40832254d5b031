"""The one global order of samples, and where in it a job stands.

The order of an epoch is a pure function of (seed, epoch, number of samples): every process computes it
alone, on any number of devices and in any framework, and gets the same. A batch is a window of it, a
shard a window of the batch. So a job that stopped at a cursor resumes there, also on another number of
devices, and sees each sample of the epoch once.

The order is that of random 64-bit keys, one per sample, sorted: the raw stream of NumPy's Philox generator is
fixed by its specification, while its ``permutation`` may change from release to release.

Ten samples, batch 4, three devices: windows 0-4, 4-8, 8-10; the last is cut into 8-9, 9-10 and nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands import shares as _shares
from manyhands.training.options import ENDLESS, Settings

if TYPE_CHECKING:
    from manyhands.training.learner import Data

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


def whole_batches(
    pairs: Iterable[tuple[Window, B]], whole: bool | Callable[[B], bool] = True
) -> Iterator[tuple[Window, B]]:
    """The same batches, marked as whole; ``whole`` may be a function that picks batches."""
    for window, batch in pairs:
        is_whole = whole if isinstance(whole, bool) else whole(batch)
        yield (replace(window, whole=True) if is_whole else window), batch


def length(data: Any) -> int | None:
    """The batches of an epoch, where the data are a loader that says it."""
    loader = getattr(data, "loader", None)
    try:
        return len(loader) or None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


class Position:
    """Where a job stands: its cursor, how much of the training is done, which samples a step had; in any process."""

    def __init__(self, data: Data, settings: Settings) -> None:
        self.data, self.settings = data, settings
        self.cursor = Cursor()
        self.last_row = 0  # the step of the newest row of metrics
        self.batches_before: int | None = None  # the batches of a loader in the epoch before
        self._row_began = time.perf_counter()
        self._seconds_before = 0.0  # of a row that the job before had begun

    @property
    def loader(self) -> Any:
        """The user's loader; None for data without one."""
        return getattr(self.data, "loader", None)

    @property
    def batches(self) -> int | None:
        """The batches of an epoch; for a loader as in the epoch before, or its ``len``; None where unknown."""
        most = self.settings.limits.batches
        if self.data.count is not None:
            batches: int | None = -(-self.data.count // self.settings.batch_size)
        else:
            batches = self.batches_before or length(self.data)
        return batches if most is None or batches is None else min(batches, most)

    @property
    def is_end_of_epoch(self) -> bool:
        """Whether the cursor is known to stand behind the last batch of its epoch."""
        is_known = self.data.count is not None or self.cursor.batch == self.settings.limits.batches
        return is_known and self.cursor.batch == self.batches

    @property
    def done(self) -> float:
        """How much of the training is done, by the limit that is nearest to be reached."""
        epochs, steps, batches = self.settings.max_epochs, self.settings.limits.max_steps, self.batches
        of_epoch = min(self.cursor.batch / batches, 1.0) if batches else 0.0
        done = (self.cursor.epoch + of_epoch) / epochs if epochs < ENDLESS else 0.0
        return done if steps is None else max(done, self.cursor.step / steps)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether ``evaluate_every`` asks for an evaluation after the step that was made last."""
        every, unit = self.settings.limits.evaluation
        return unit == "steps" and self.cursor.step % every == 0 and self.cursor.step > self.last_row

    def samples_of(self, step: int) -> NDArray[np.int64] | None:
        """The samples in the batch of a step of this epoch; None for a loader, whose order is its own."""
        if self.data.count is None:
            return None
        epoch = 0 if self.settings.limits.overfit_batches is not None else self.cursor.epoch
        order = epoch_order(self.settings.seed, epoch, self.data.count, shuffle=self.data.shuffle)
        first = self.batch_of(step) * self.settings.batch_size
        return order[first : first + self.settings.batch_size]

    def batch_of(self, step: int) -> int:
        """The number of a step's batch in this epoch."""
        return self.cursor.batch - (self.cursor.step - step)

    def next_epoch(self) -> None:
        self.batches_before = self.cursor.batch if self.data.count is None else None
        self.cursor = self.cursor.next_epoch()

    # The time of a row of metrics: since the row before, or since the epoch began.

    @property
    def seconds_of_row(self) -> float:
        return time.perf_counter() - self._row_began

    def begin_row(self) -> None:
        self._row_began = time.perf_counter()

    def begin_epoch(self) -> None:
        """A row that the job before had begun goes on."""
        self._row_began = time.perf_counter() - (self._seconds_before if self.cursor.sample else 0.0)

    # Checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "cursor": asdict(self.cursor),
            "last_row": self.last_row,
            "batches_before": self.batches_before,
            "seconds_of_row": self.seconds_of_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = Cursor(**state["cursor"])
        self.last_row, self.batches_before = state["last_row"], state["batches_before"]
        self._seconds_before = state["seconds_of_row"]
