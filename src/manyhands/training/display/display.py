"""What a job's events look like to a person: one display, whatever the number of processes."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, Self

from manyhands.training.display.progress_bar import Progress

_MEASURED = 1.0  # seconds of steps, after the first ones, that the estimate stands on
_SHORT = 5.0  # seconds; what takes less needs no estimate


class Display:
    """Turns the events of a job's first rank into a progress bar, an estimate and warnings."""

    def __init__(self, epochs: int | None, steps: int | None = None, *, quiet: bool) -> None:
        """``epochs`` and ``steps`` are where the job ends; None where it does not."""
        self._progress = Progress(epochs, quiet=quiet)
        self._epochs, self._steps = epochs, steps
        self._since = (time.perf_counter(), 0, 0)
        self._warm: tuple[float, int] | None = None  # when the first steps were done, and how many they were
        self._estimated = False
        self._validation: dict[str, float | None] = {}  # of the last evaluation

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._progress.__exit__(*exception)

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event["batches"] and not self._estimated:
            self._estimate(event)
        if event["kind"] == "progress" and event["batches"] and sys.stderr.isatty():
            rate = {f"{event.get('unit', 'samples')}_per_second": self._rate(event["epoch"], event["samples"])}
            self._progress.update(
                event["batch"],
                event["batches"],
                epoch=event["epoch"] + 1,
                loss=event["loss"],
                accuracy=event["accuracy"],
                **rate,
                **self._validation,
            )
        elif event["kind"] == "evaluation":
            self._validation = {name: event.get(name) for name in ("val_loss", "val_acc")}
        elif event["kind"] in ("epoch", "row"):
            self._progress.line(row_line(event, "step" if event["kind"] == "row" else "epoch"))
        elif event["kind"] == "note":
            self._progress.line(event["text"])
        elif event["kind"] == "warning":
            warnings.warn(event["text"], stacklevel=2)

    def _estimate(self, event: dict[str, Any]) -> None:
        """Say once how long the rest takes at the speed of the steps so far, the first ones (warm-up) apart."""
        now, step = time.perf_counter(), event["step"]
        if self._warm is None:
            self._warm = (now, step)
            return
        seconds, steps = now - self._warm[0], step - self._warm[1]
        if seconds < _MEASURED or steps < 1:
            return
        self._estimated = True
        ends = [self._steps - step] if self._steps is not None else []
        if self._epochs is not None:
            ends.append(event["batches"] * (self._epochs - event["epoch"]) - event["batch"])
        left = min(ends, default=0)
        if left * seconds / steps >= _SHORT:
            self._progress.line(f"about {_duration(left * seconds / steps)} to go")

    def _rate(self, epoch: int, samples: int) -> float | None:
        then, epoch_then, samples_then = self._since
        now = time.perf_counter()
        if epoch != epoch_then or samples < samples_then:
            self._since = (now, epoch, samples)
            return None
        return (samples - samples_then) / (now - then) if now > then and samples > samples_then else None


def row_line(row: Mapping[str, Any], where: str = "epoch") -> str:
    """A row of figures as one line, those of the user's metrics too; ``where`` it stands: its epoch, or its step.

    >>> row = {"epoch": 2, "train_loss": 0.41, "train_acc": None, "val_loss": 0.38, "val_mae": 12.5, "seconds": 1.5}
    >>> row_line(row)
    'epoch 2: loss 0.410, val loss 0.380, val mae 12.500, seconds 1.500'
    """
    named = {"loss": row["train_loss"], "accuracy": row.get("train_acc")}
    named |= {name.replace("_", " "): value for name, value in row.items() if name.startswith("val_")}
    named["seconds"] = row["seconds"]
    shown = ", ".join(f"{name} {value:.3f}" for name, value in named.items() if isinstance(value, (int, float)))
    return f"{where} {row[where]}: {shown}"


def _duration(seconds: float) -> str:
    """A duration, rounded as an estimate is.

    >>> [_duration(seconds) for seconds in (8.2, 41, 61, 600, 9000)]
    ['10 seconds', '40 seconds', '1 minute', '10 minutes', '2.5 hours']
    """
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    if seconds < 5400:
        minutes = round(seconds / 60)
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    return f"{seconds / 3600:.1f} hours"
