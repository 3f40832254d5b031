"""Where a job stands: its cursor, how much of the training is done, and which samples a step had."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.amounts import counted
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, epoch_order
from manyhands.training.learner import Data
from manyhands.training.options import ENDLESS, Settings


class Position:
    """One process's position in a job; the same in all of them."""

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
            batches = self.batches_before or loader_batches.length(self.data)
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

    def next_epoch(self) -> str | None:
        """Go to the next epoch; a note where a loader gave another number of batches than it had said."""
        note, batch = None, self.cursor.batch
        if self.data.count is None:
            length = loader_batches.length(self.data)
            if self.batches_before is None and length not in (None, batch):
                note = (
                    f"the loader's len is {length}, and it gave {counted(batch, 'batch', 'batches')}: progress and "
                    "schedule go by the batches of the epoch before"
                )
            self.batches_before = batch
        self.cursor = self.cursor.next_epoch()
        return note

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
