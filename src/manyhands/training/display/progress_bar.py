"""One progress display for a training run.

On a terminal a bar over the steps of the epoch, redrawn at most ten times a second; elsewhere (a log
file, a notebook, CI) one plain line per epoch. Everything goes to the standard error, so that what a
program prints can still be piped. A display that cannot be written to falls silent: training goes on.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_PAUSE = 0.1  # seconds between two redraws
_WORDS = {
    "images_per_second": "{:,.0f} images/s",
    "samples_per_second": "{:,.0f} samples/s",
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.4f}",
    "val_loss": "val loss {:.4f}",
    "val_acc": "val acc {:.4f}",
}


class ProgressBar:
    """A context manager; `update` may be called every step, and costs about a microsecond when nothing is drawn.

    >>> with ProgressBar(epochs=10) as progress:
    ...     progress.update(5, 235, epoch=1, images_per_second=51234.0, loss=0.71, accuracy=0.74)
    """

    def __init__(self, epochs: int | None, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        """``epochs``: None where the job has another end."""
        self._epochs = epochs
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet or self._stream is None  # a program without a console has no standard error
        self._bar: Bar | None = None
        self._next = 0.0
        self._step = self._total = self._epoch = 0
        self._figures: dict[str, float | None] = {}
        self._printed = 0  # the last epoch that has its plain line

    def __enter__(self) -> Self:
        if not self._quiet:
            self._bar = _bar(self._stream)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.stop()
            self._bar = None
        else:
            self._print_epoch()

    def update(self, step: int, total: int, *, epoch: int, **figures: float | None) -> None:
        """Step `step` of `total` in this epoch (both from 1) is done.

        Figures are plain numbers, never tensors on a device, whose reading would wait. One that is not
        given keeps its last value. Those of `_WORDS` are shown in words of their own.
        """
        if self._quiet:
            return
        if epoch != self._epoch:
            self._begin(epoch)
        self._step, self._total = step, total
        self._figures.update(figures)
        if self._bar is None:
            if step >= total:
                self._print_epoch()
            return
        now = time.monotonic()
        if now >= self._next or step >= total:
            self._next = now + _PAUSE
            self._draw(self._bar)

    def line(self, text: str) -> None:
        """Print a line of text, above the bar where there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # a closed pipe, or a closed file
            self._quiet = True

    def _begin(self, epoch: int) -> None:
        if self._bar is None:
            self._print_epoch()
        else:
            self._bar.reset(self._bar.task_ids[0])
        self._epoch = epoch
        self._figures.clear()

    def _draw(self, bar: Bar) -> None:
        bar.update(
            bar.task_ids[0],
            description=self._description(),
            completed=self._step,
            total=self._total or None,
            figures="  ".join(self._words()),
        )
        bar.refresh()

    def _print_epoch(self) -> None:
        """The plain line of the epoch, once; with its step if the epoch was not finished."""
        if self._quiet or self._printed == self._epoch:
            return
        self._printed = self._epoch
        unfinished = [f"step {self._step}/{self._total}"] if self._step < self._total else []
        self.line("  ".join([self._description(), *unfinished, *self._words()]))

    def _description(self) -> str:
        of_all = f"/{self._epochs}" if self._epochs is not None else ""
        return f"epoch {self._epoch}{of_all}" if self._epoch else "starting"

    def _words(self) -> list[str]:
        figures = {name: value for name, value in self._figures.items() if value is not None}
        known = [form.format(figures[name]) for name, form in _WORDS.items() if name in figures]
        others = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items() if name not in _WORDS]
        return known + others


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
