"""``Progress``: what a training shows while it runs; the one callback that is there by default.

On a terminal there is a bar over the steps of the epoch, redrawn a few times a second; elsewhere (a log file, a
notebook, CI) only lines are printed. Both go to standard error, so that the program's own output can be piped. If
standard error cannot be written to, the display falls silent and training continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from manyhands.training.callbacks.callback import Callback, Row, Training, Values

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


_SHOWN = ("train_loss", "train_acc", "val_loss", "val_acc")  # beside a bar
_NO_METRICS = ("epoch", "step", "samples", "seconds", "whole")


class Progress(Callback):
    """Shows how a training goes: a bar on a terminal, elsewhere one line per epoch.

    Every trainer has one. To show something else, derive a class from it and give that to the trainer, which then
    takes it instead: ``Trainer(callbacks=[MyProgress()])``. With ``quiet=True`` none is called.
    """

    _bar: Bar | None = None  # on a terminal
    _stream: TextIO | None = None  # None without a console, and where it cannot be written to

    def on_fit_start(self, training: Training) -> None:
        self._stream = sys.stderr
        self._bar = None if self._stream is None else _bar(self._stream)
        if self._bar is not None:
            self._bar.start()
        self._epoch_began = (time.perf_counter(), 0, 0)  # with the epoch, and the samples of it that were done then
        self._figures: dict[str, float] = {}  # the newest of this epoch, and of the last evaluation

    def on_progress(self, training: Training, figures: Values) -> None:
        if self._bar is None or not training.batches:
            return
        newest = {"train_loss": figures.get("loss"), "train_acc": figures.get("accuracy")}
        self._figures |= {name: value for name, value in newest.items() if value is not None}
        speed = self._samples_per_second(training.epoch, int(figures["samples"]))
        shown = [] if speed is None else [f"{speed:,.0f} samples/s"]
        shown += [f"{name} {self._figures[name]:.4f}" for name in _SHOWN if name in self._figures]
        of_all = f"/{training.max_epochs}" if training.max_epochs is not None else ""
        self._bar.update(
            self._bar.task_ids[0],
            description=f"epoch {training.epoch}{of_all}",
            completed=int(figures["batch"]),
            total=training.batches,
            figures="  ".join(shown),
        )
        self._bar.refresh()

    def on_epoch_start(self, training: Training) -> None:
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0])
            self._figures = {name: value for name, value in self._figures.items() if name.startswith("val_")}

    def on_evaluation(self, training: Training, figures: Values) -> None:
        if self._bar is not None:
            self._figures |= figures

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
            self._bar.refresh()
            self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._stream is not None:
            try:
                print(text, file=self._stream, flush=True)
            except (OSError, ValueError):  # a closed pipe, or a closed file
                self._stream = None

    def _samples_per_second(self, epoch: int, samples: int) -> float | None:
        then, epoch_then, samples_then = self._epoch_began
        now = time.perf_counter()
        if epoch != epoch_then or samples < samples_then:
            self._epoch_began = (now, epoch, samples)
            return None
        return (samples - samples_then) / (now - then) if now > then and samples > samples_then else None


def row_line(row: Mapping[str, Any], where: str = "epoch") -> str:
    """A row of metrics as one line, by the names that they have everywhere; ``where`` it is: its epoch, or its step.

    >>> row = {"epoch": 2, "train_loss": 0.41, "train_acc": None, "val_loss": 0.38, "val_mae": 12.5, "seconds": 1.5}
    >>> row_line(row)
    'epoch 2: train_loss 0.410, val_loss 0.380, val_mae 12.500, seconds 1.500'
    """
    metrics = {name: value for name, value in row.items() if name not in _NO_METRICS and not name.startswith("lr")}
    named = {**metrics, "seconds": row["seconds"]}
    shown = ", ".join(f"{name} {value:.3f}" for name, value in named.items() if isinstance(value, (int, float)))
    return f"{where} {row[where]}: {shown}"


def _bar(stream: TextIO) -> Bar | None:
    """A bar with one task, or None where the stream cannot show one."""
    if not stream.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(file=stream)
    if console.is_dumb_terminal:
        return None
    bar = Bar(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,  # no thread of its own: it is drawn when there is something new
        expand=True,
        redirect_stdout=sys.stdout.isatty(),  # else what is piped to a file would land on the terminal
    )
    bar.add_task("starting", total=None, figures="")
    return bar
