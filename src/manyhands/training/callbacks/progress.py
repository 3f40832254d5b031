"""``Progress``: what a training shows while it runs; the one callback that is there by default."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from manyhands.amounts import counted
from manyhands.training.callbacks.callback import Callback, Row, Training, Values
from manyhands.training.display.progress_bar import ProgressBar

_MEASURED = 1.0  # seconds of steps, after the first ones, that the estimate is based on
_SHORT = 5.0  # seconds; what takes less needs no estimate


class Progress(Callback):
    """Shows how a training goes: a bar on a terminal, elsewhere one line per epoch.

    Every trainer has one. To show something else, derive a class from it and give that to the trainer, which then
    takes it instead: ``Trainer(callbacks=[MyProgress()])``. With ``quiet=True`` none is called.
    """

    _bar: ProgressBar | None = None

    def on_fit_start(self, training: Training) -> None:
        self._bar = ProgressBar(training.max_epochs)
        self._epoch_began = (time.perf_counter(), 0, 0)  # with the epoch, and the samples of it that were done then
        self._warmed_up: tuple[float, int] | None = None  # when the first steps were done, and how many they were
        self._estimated = False
        self._validation: dict[str, float | None] = {}  # of the last evaluation

    def on_progress(self, training: Training, figures: Values) -> None:
        if self._bar is None or not training.batches:
            return
        if not self._estimated:
            self._estimate(self._bar, training, int(figures["batch"]))
        self._bar.update(
            int(figures["batch"]),
            training.batches,
            epoch=training.epoch,
            loss=figures.get("loss"),
            accuracy=figures.get("accuracy"),
            samples_per_second=self._samples_per_second(training.epoch, int(figures["samples"])),
            **self._validation,
        )

    def on_evaluation(self, training: Training, figures: Values) -> None:
        self._validation = {name: figures.get(name) for name in ("val_loss", "val_acc")}

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._line(row_line(row))

    def on_row(self, training: Training, row: Row) -> None:
        """A row of figures within an epoch, where ``Limits(evaluate_every="100 steps")`` asks for it."""
        self._line(row_line(row, "step"))

    def on_note(self, training: Training, text: str) -> None:
        """The job has something to say: where it resumes, why it stops."""
        self._line(text)

    def on_fit_end(self, training: Training) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.line(text)

    def _estimate(self, bar: ProgressBar, training: Training, batch: int) -> None:
        """Say once how long the rest takes at the speed of the steps so far, the first ones (warm-up) apart."""
        now = time.perf_counter()
        if self._warmed_up is None:
            self._warmed_up = (now, training.step)
            return
        seconds, steps = now - self._warmed_up[0], training.step - self._warmed_up[1]
        if seconds < _MEASURED or steps < 1:
            return
        self._estimated = True
        ends = [training.max_steps - training.step] if training.max_steps is not None else []
        if training.max_epochs is not None and training.batches is not None:
            ends.append(training.batches * (training.max_epochs - training.epoch + 1) - batch)
        left = min(ends, default=0) * seconds / steps
        if left >= _SHORT:
            bar.line(f"about {_duration(left)} to go")

    def _samples_per_second(self, epoch: int, samples: int) -> float | None:
        then, epoch_then, samples_then = self._epoch_began
        now = time.perf_counter()
        if epoch != epoch_then or samples < samples_then:
            self._epoch_began = (now, epoch, samples)
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
        return counted(minutes, "minute")
    return f"{seconds / 3600:.1f} hours"
