"""Where a report goes: the files, checked before anything runs, and the text for a terminal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings
from manyhands.files import check_writable
from manyhands.lab import html, plots
from manyhands.lab.finding import Table
from manyhands.lab.result import Report, Result


@dataclass(frozen=True, slots=True)
class Output:
    """The paths of the page, of the raw trials, and of a folder for both and every plot; None: not written."""

    html: Path | None = None
    json: Path | None = None
    folder: Path | None = None

    def check(self) -> None:
        """Raise if a file could not be written. Creates the folder."""
        if self.folder is not None:
            try:
                (self.folder / "plots").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadSettings(f"the folder {str(self.folder)!r} cannot be made: {error.strerror}") from error
            check_writable(self.folder / "plots" / "plot.svg", BadSettings)
        for path in self.pages():
            check_writable(path, BadSettings)

    def pages(self) -> list[Path]:
        inside = [] if self.folder is None else [self.folder / "report.html", self.folder / "report.json"]
        return [path for path in (self.html, self.json, *inside) if path is not None]

    def write(self, report: Report) -> list[Path]:
        """Write all files; returns the paths of the page and the trials."""
        path = self.folder
        try:
            for path in self.pages():
                is_json = path == self.json or (self.folder is not None and path.suffix == ".json")
                trials = json.dumps(_finite(report.as_data()), indent=1, allow_nan=False)
                path.write_text(f"{trials}\n" if is_json else html.page(report), encoding="utf-8")
            if self.folder is not None and report.results and (finding := report.results[-1].finding) is not None:
                name = f"{report.results[-1].experiment}-{report.results[-1].framework}"
                for number, plot in enumerate(finding.plots):
                    path = self.folder / "plots" / f"{name}-{number + 1}.svg"
                    path.write_text(plots.svg(plot), encoding="utf-8")
                    plots.save_png(plot, path.with_suffix(".png"))
        except OSError as error:
            # An error while writing, such as a full disk, does not name the file.
            raise BadSettings(f"{str(error.filename or path)!r} cannot be written: {error.strerror}") from error
        return self.pages()


def _finite(value: Any) -> Any:
    """The same data, with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(result: Result) -> str:
    """A result as text for a terminal."""
    lines = [f"{result.question} ({result.experiment}, {result.framework}, {result.seconds:.0f} s)"]
    lines.append(f"  {result.exercise}")
    if result.why:
        lines.append(f"  {result.status}: {result.why}")
    if result.finding is not None:
        for table in result.finding.tables:
            lines += ["", *_aligned(table)]
        lines += ["", f"  {result.finding.conclusion}", *(f"  {note}" for note in result.finding.notes)]
    return "\n".join(lines) + "\n"


def _aligned(table: Table) -> list[str]:
    rows = [list(table.headers), *map(list, table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {table.title}"] if table.title else []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
