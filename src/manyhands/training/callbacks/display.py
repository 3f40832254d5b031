"""What is shown of a training: its progress, and in a run's folder the picture of its curves.

On a terminal :class:`Progress` is a bar over the steps of the epoch, redrawn a few times a second; elsewhere (a log
file, a notebook, CI) only lines are printed. Both go to standard error, so that the program's own output can be piped.
If standard error cannot be written to, the display falls silent and training continues.

:class:`Picture` draws loss and accuracy over the epochs, of training and of validation.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from manyhands import files
from manyhands.training.callbacks.callback import NO_METRICS, Callback, Row, Training, Values
from manyhands.training.checkpoints.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.progress import Progress as Bar


_SHOWN = ("train_loss", "train_acc", "val_loss", "val_acc")  # beside a bar


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
        self._metrics: dict[str, float] = {}  # the newest of this epoch, and of the last evaluation

    def on_progress(self, training: Training, metrics: Values) -> None:
        if self._bar is None or not training.batches:
            return
        newest = {"train_loss": metrics.get("loss"), "train_acc": metrics.get("accuracy")}
        self._metrics |= {name: value for name, value in newest.items() if value is not None}
        speed = self._samples_per_second(training.epoch, int(metrics["samples"]))
        shown = [] if speed is None else [f"{speed:,.0f} samples/s"]
        shown += [f"{name} {self._metrics[name]:.4f}" for name in _SHOWN if name in self._metrics]
        of_all = f"/{training.max_epochs}" if training.max_epochs is not None else ""
        self._bar.update(
            self._bar.task_ids[0],
            description=f"epoch {training.epoch}{of_all}",
            completed=int(metrics["batch"]),
            total=training.batches,
            metrics="  ".join(shown),
        )
        self._bar.refresh()

    def on_epoch_start(self, training: Training) -> None:
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0])
            self._metrics = {name: value for name, value in self._metrics.items() if name.startswith("val_")}

    def on_evaluation(self, training: Training, metrics: Values) -> None:
        if self._bar is not None:
            self._metrics |= metrics

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._line(row_line(row))

    def on_row(self, training: Training, row: Row) -> None:
        """A row of metrics within an epoch, where ``Limits(evaluate_every="100 steps")`` asks for it."""
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
    metrics = {name: value for name, value in row.items() if name not in NO_METRICS and not name.startswith("lr")}
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
        TextColumn("{task.fields[metrics]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,  # no thread of its own: it is drawn when there is something new
        expand=True,
        transient=True,  # the lines stay
        redirect_stdout=sys.stdout.isatty(),  # else what is piped to a file would land on the terminal
    )
    bar.add_task("starting", total=None, metrics="")
    return bar


# The picture of a run

LOSS, ACCURACY = "#4e79a7", "#e15759"
# The colour says what is drawn, the line of which data: solid of training, dashed of validation.
_LINES = {  # key: label, style, colour
    "train_loss": ("train loss", "-", LOSS),
    "val_loss": ("val loss", "--", LOSS),
    "train_acc": ("train acc", "-", ACCURACY),
    "val_acc": ("val acc", "--", ACCURACY),
}
_FEW = 25  # points; fewer are also drawn as dots, and a single one could not be seen without
_EVERY = 15.0  # seconds between two drawings: each takes a part of one


def curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the losses (left axis) and accuracies (right axis) over the epochs; the file's ending says how."""
    figure = _figure(rows, title)
    path = Path(path)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".") or "png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, picture.getvalue())
    return path


def _figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    figure = files.new_figure("the curves", (6.4, 4.2))
    from matplotlib.ticker import MaxNLocator

    # Over epochs; over steps where an epoch has several rows.
    epochs = [row["epoch"] for row in rows if _is_number(row.get("epoch"))]
    across = "step" if len(set(epochs)) < len(epochs) and all("step" in row for row in rows) else "epoch"
    left = figure.add_subplot()
    right: Any = None
    across_all, losses = [2.0], list[float]()  # the point of a single epoch stands in the middle
    for key, (label, style, colour) in _LINES.items():
        points = [(row[across], row[key]) for row in rows if _is_number(row.get(across)) and _is_number(row.get(key))]
        if not points:
            continue
        if colour == ACCURACY and right is None:
            right = left.twinx()
            right.set_ylabel("accuracy", color=ACCURACY)
            right.set_ylim(0.0, 1.0)
        x, y = zip(*points, strict=True)
        across_all += [max(x) * 1.02]
        losses += y if colour == LOSS else []
        (left if colour == LOSS else right).plot(
            x,
            y,
            linestyle=style,
            color=colour,
            marker="o" if len(x) <= _FEW else None,
            markerfacecolor="white" if key.startswith("val_") else colour,
            label=f"{label} {y[-1]:.3g}" if colour == LOSS else f"{label} {y[-1]:.3f}",
            clip_on=False,  # an accuracy of 1 lies on the edge
        )
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    left.set_xlabel(across)
    left.set_title(title, fontsize="medium")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlim(0.0, max(across_all))
    left.set_ylabel("loss", color=LOSS)
    left.grid(visible=True, alpha=0.3, linewidth=0.7)
    if losses and min(losses) >= 0.0:
        left.set_ylim(bottom=0.0)
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize="small")
    return figure


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Picture(Callback):
    """Draws ``curves.png`` from the first epoch on; a training is worth more than its picture: nothing fails here."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._drawn, self._before = time.monotonic(), 0

    def on_fit_start(self, training: Training) -> None:
        self._drawn, self._before = time.monotonic(), len(training.rows)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        if time.monotonic() - self._drawn > _EVERY:
            self._draw(training)

    def on_fit_end(self, training: Training) -> None:
        reason = self._draw(training)
        if reason is not None and training.result is not None:
            training.result.notes.append(f"no picture: {reason}")

    def _draw(self, training: Training) -> str | None:
        """Why there is no picture; None where there is one, or nothing new to draw."""
        if training.run is None or len(training.rows) == self._before:
            return None
        devices = [] if training.result is None else training.result.devices
        title = f"{self.title} on {', '.join(devices)}" if devices else self.title
        try:
            curves(training.rows, RunFolder(training.run).plot_path, title=title)
        except Exception as error:  # whatever drawing raises
            return str(error)
        finally:
            self._drawn = time.monotonic()
        return None
