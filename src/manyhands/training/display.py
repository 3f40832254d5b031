"""What a job's events look like to a person: one display, whatever the number of processes."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any, Self

from manyhands.training.progress import Progress


class Display:
    """Turns the events of a job's first rank into a progress bar and warnings."""

    def __init__(self, epochs: int, *, quiet: bool) -> None:
        self._progress = Progress(epochs, quiet=quiet)
        self._since = (time.perf_counter(), 0, 0)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._progress.__exit__(*exception)

    def event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and event["batches"] and sys.stderr.isatty():
            self._progress.update(
                event["batch"],
                event["batches"],
                epoch=event["epoch"] + 1,
                images_per_second=self._rate(event["epoch"], event["samples"]),
                loss=event["loss"],
                accuracy=event["accuracy"],
            )
        elif event["kind"] == "epoch":
            figures = {
                "loss": event["train_loss"],
                "accuracy": event["train_acc"],
                "test acc": event["test_acc"],
                "seconds": event["seconds"],
            }
            shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if value is not None)
            self._progress.line(f"epoch {event['epoch']}: {shown}")
        elif event["kind"] == "warning":
            warnings.warn(event["text"], stacklevel=2)

    def _rate(self, epoch: int, samples: int) -> float | None:
        then, epoch_then, samples_then = self._since
        now = time.perf_counter()
        if epoch != epoch_then or samples < samples_then:
            self._since = (now, epoch, samples)
            return None
        return (samples - samples_then) / (now - then) if now > then and samples > samples_then else None
