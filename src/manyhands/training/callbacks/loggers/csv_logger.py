"""``CSVLogger``: figures as tables that every spreadsheet reads.

The columns of a table are those of its first row; a new figure in a later row adds a column, and the table is
rewritten. A job that is resumed drops the rows of steps that it will make again.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.loggers.logger import Logger
from manyhands.training.checkpoints import atomic_files

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
        atomic_files.replace(self._path, text.getvalue().encode())
        self._may_be_torn = False
