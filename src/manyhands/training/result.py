"""The result of a training job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """The result of a job: one row per epoch, notes, and why it ended."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    shares: list[float] | None = None
    # Why the training ended: "max_epochs", "max_steps", "max_time", "signal SIGTERM", "end of the data" (of a stream),
    # "early stopping: val_loss has not improved for 3 evaluations; ...", "stopped by callback: the reason".
    ended: str = ""
    # The reason alone where a callback or a signal ended it; None: none did.
    stopped: str | None = None
    run: str | None = None
    # What could not be written to the run's folder (a full disk); empty: all is there.
    unsaved: list[str] = field(default_factory=list)
    # The signal that has stopped the job, as "SIGTERM"; None: none did. And the steps of the run so far.
    signal: str | None = None
    steps: int = 0

    @property
    def val_acc(self) -> float:
        """Of the last epoch; NaN where there were no validation data, or no classes."""
        accuracy = self.rows[-1].get("val_acc") if self.rows else None
        return math.nan if accuracy is None else float(accuracy)

    @property
    def val_loss(self) -> float:
        """Of the last epoch; NaN where there were no validation data."""
        loss = self.rows[-1].get("val_loss") if self.rows else None
        return math.nan if loss is None else float(loss)

    @property
    def seconds_per_epoch(self) -> float:
        """The mean over whole epochs, without the first (it warms up) if there are others."""
        seconds = [row["seconds"] for row in self.rows if row.get("whole", True)]
        seconds = seconds[1:] or seconds
        return sum(seconds) / len(seconds) if seconds else math.nan

    def __str__(self) -> str:
        """One line, with the accuracy; without classes the loss over the validation data, else that of the training."""
        row = self.rows[-1] if self.rows else {}
        names = [name for name in ("val_acc", "val_loss", "train_loss") if row.get(name) is not None]
        known = [f"{name} {row[name]:.3f}" for name in names[:1]]
        seconds = [] if math.isnan(self.seconds_per_epoch) else [f"{self.seconds_per_epoch:.2f} sec/epoch"]
        why = f"; ended: {self.ended}" if self.ended not in ("", "max_epochs") else ""
        return f"{', '.join(known + seconds) or 'trained'} on [{', '.join(self.devices)}]{why}"
