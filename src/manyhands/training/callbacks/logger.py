"""Loggers write metrics somewhere, in a separate thread: ``Logger``, to derive from, and ``CSVLogger``."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from manyhands import files
from manyhands.errors import BadSettings, PackageMissing
from manyhands.training.callbacks.callback import Callback, Row, Training, Values

# What of a row is no metric.
_NO_METRICS = ("epoch", "step", "whole")


class Logger(Callback):
    """Writes figures: the row of every epoch, and with ``every`` also the means over that many steps.

    Your own logger overrides :meth:`write_row` and :meth:`write_steps`, and if need be :meth:`open`,
    :meth:`flush` and :meth:`close`. These five are called in order, in a separate thread: a slow disk or network
    keeps no step waiting. Before each checkpoint all figures up to it are written.

    Args:
        every: Steps between two figures of steps. Default: None, only those of epochs.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise BadSettings(f"{type(self).__name__}(every={every!r}): give a number of steps of at least 1, or None")
        self.every = every
        self._background: Background | None = None
        self._is_open = False

    def open(self, training: Training, step: int | None) -> None:
        """Before the first figures; where the job was resumed, ``step`` is the last one that counts, else None."""

    def write_row(self, epoch: int, step: int, figures: dict[str, Any]) -> None:
        """The figures of an epoch, or since the last row: as ``result.rows`` has them."""

    def write_steps(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        """The means over the last ``every`` steps."""

    def flush(self) -> None:
        """Bring everything that was written to where a kill does not lose it."""

    def close(self) -> None:
        """The training is over."""

    # Events

    def on_fit_start(self, training: Training) -> None:
        self._training, self._step = training, training.step if training.resumed else None
        self._is_open = False
        self._background = Background(type(self).__name__)

    def on_steps(self, training: Training, figures: Values) -> None:
        self._hand_over(self.write_steps, training, figures)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self.on_row(training, row)

    def on_row(self, training: Training, row: Row) -> None:
        """A row within an epoch."""
        figures = {name: value for name, value in row.items() if name not in _NO_METRICS and value is not None}
        self._hand_over(self.write_row, training, figures)

    def on_fit_end(self, training: Training) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.hand_over(self._end)
            background.close()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """Called for a checkpoint: figures before it are not logged again, so they have to be written first."""
        if self._background is not None:
            self._background.drain()
            if self._is_open:
                self._background.hand_over(self.flush)
                self._background.drain()
        return self.saved_state()

    def saved_state(self) -> dict[str, Any]:
        """The state of this logger that a checkpoint keeps, as JSON."""
        return {}

    def _hand_over(self, write: Any, training: Training, figures: dict[str, Any]) -> None:
        assert self._background is not None
        epoch, step, values = training.epoch, training.step, dict(figures)
        self._background.hand_over(lambda: self._write(write, epoch, step, values))

    def _write(self, write: Any, *values: Any) -> None:
        if not self._is_open:  # not before there is something: a job that is refused leaves no trace
            self.open(self._training, self._step)
            self._is_open = True
        write(*values)

    # For subclasses

    def folder(self, training: Training, chosen: Path | None) -> Path:
        """The folder to write to: the user's, or the run's."""
        if chosen is not None:
            return chosen
        if training.run is None:
            raise BadSettings(f"{type(self).__name__} has no folder to write to: give Trainer(run=...), or folder=")
        return training.run


def package(name: str, who: str, pip: str) -> Any:
    """An optional package, imported when it is used first."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissing(f"{who} needs the package {pip}: pip install {pip} ({error})") from error


class Background:
    """A thread that writes, in order: the training does not wait for a disk or a network.

    If the disk is full there is a warning, and the training continues. Any other error is raised when the next work is
    handed over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"manyhands-{name}")
        self._error: Exception | None = None
        self._has_warned = False

    def hand_over(self, work: Callable[[], None]) -> None:
        """Have it done soon."""
        self._raise()
        self._thread.submit(self._run, work)

    def drain(self) -> None:
        """Return when all that was handed over is done."""
        self._thread.submit(int).result()
        self._raise()

    def close(self) -> None:
        """Do what is left, and end the thread."""
        self._thread.shutdown()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:  # once, until it works again
                self._has_warned = True
                text = f"{self._name} could not write: {error.strerror or error}. Training continues"
                with contextlib.suppress(Warning):  # where warnings are errors: this thread has no caller for them
                    warnings.warn(text, stacklevel=2)
        except Exception as error:
            self._error = self._error or error


_FIRST = ["epoch", "step"]


class CSVLogger(Logger):
    """Write figures as CSV: ``metrics.csv`` has a row per epoch, ``steps.csv`` one per ``every`` steps.

    Args:
        folder: Where to write. Default: None, the run's folder.
        every: Steps between two rows of ``steps.csv``. Default: None, there is none.
    """

    def __init__(self, folder: str | Path | None = None, *, every: int | None = None) -> None:
        super().__init__(every)
        self._folder = None if folder is None else Path(folder).expanduser()
        self._tables: dict[str, _Table] = {}

    def on_fit_start(self, training: Training) -> None:
        self.folder(training, self._folder)  # an error now, not in the first epoch's end
        # A checkpoint of an epoch's last step may be older than its row, which then comes again.
        self._last_row = training.rows[-1]["step"] if training.rows else 0
        super().on_fit_start(training)

    def open(self, training: Training, step: int | None) -> None:
        folder = self.folder(training, self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        last = {"metrics": None if step is None else self._last_row, "steps": step}
        self._tables = {name: _Table(folder / f"{name}.csv", until) for name, until in last.items()}

    def write_row(self, epoch: int, step: int, figures: dict[str, Any]) -> None:
        self._tables["metrics"].add({"epoch": epoch, "step": step, **figures})

    def write_steps(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        self._tables["steps"].add({"epoch": epoch, "step": step, **figures})


class _Table:
    """One CSV file."""

    def __init__(self, path: Path, step: int | None) -> None:
        """``step``: of a table that is there, rows up to this step stay; None: none do."""
        self._path = path
        self._columns: list[str] = []
        self._may_be_torn = False
        if step is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            self._columns, rows = self._read()
            self._replace([row for row in rows if int(row["step"]) <= step])

    def add(self, row: dict[str, Any]) -> None:
        if self._may_be_torn or not set(row) <= set(self._columns):
            rows = self._read()[1] if self._path.exists() else []
            self._columns += [name for name in row if name not in self._columns]
            self._replace([*rows, row])
            return
        self._may_be_torn = True  # until this line is whole: the disk may be full
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            self._writer(file).writerow(row)
        self._may_be_torn = False

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and rows, without a last row that a kill cut short."""
        text = self._path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        columns = list(reader.fieldnames or _FIRST)
        if columns[:2] != _FIRST:
            raise BadSettings(f"{self._path} is not a table of CSVLogger: its columns are {', '.join(columns)}")
        return columns, list(reader)

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        files.replace(self._path, text.getvalue().encode())
        self._may_be_torn = False
