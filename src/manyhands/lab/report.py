"""The report: the results of all experiments as data, as text for a terminal, as one HTML page and as files.

The page is self-contained: no network, light and dark, readable on a phone.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from manyhands.audit.reports.html import page_of
from manyhands.errors import BadSettings
from manyhands.files import check_writable
from manyhands.lab.finding import Finding, Plot, Table, Trial
from manyhands.lab.plots import save_png, svg

SCHEMA = 2

Status = Literal["done", "not here", "not measured", "failed", "interrupted"]
_STYLE = """
.card { border-top: 1px solid var(--line); margin-top: 2rem; }
.conclusion { font-weight: 600; } .failed { color: var(--wait); font-weight: 600; }
nav li { margin: 0.2rem 0; } caption { text-align: left; font-weight: 600; padding: 0.4rem; }
img { width: 100%; max-width: 46rem; display: block; margin: 0.5rem 0 1.5rem; }
"""


@dataclass(frozen=True, slots=True)
class Result:
    """``why``: the reason if it did not finish. ``virtual``: the virtual devices that replaced real ones."""

    experiment: str
    question: str
    exercise: str
    framework: str
    status: Status
    seconds: float = 0.0
    finding: Finding | None = None
    trials: Sequence[Trial] = ()
    virtual: Sequence[str] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results in the order of their runs, and the machine they were measured on."""

    quick: bool
    host: Mapping[str, Any]
    frameworks: Sequence[Mapping[str, Any]]  # as `manyhands devices --json` lists them
    results: Sequence[Result] = ()
    manyhands: str = ""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def with_result(self, result: Result) -> Report:
        return replace(self, results=[*self.results, result])

    def as_data(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def marked(finding: Finding, virtual: Sequence[str], framework: str) -> Finding:
    """The same finding; if devices were virtual, every table, plot and conclusion says so."""
    if not virtual:
        return finding
    mark = f"{len(virtual)} virtual devices" if len(virtual) > 1 else "a virtual device"
    tables = [replace(table, title=f"{table.title or 'Times'} ({mark})") for table in finding.tables]
    plots = [replace(plot, title=f"{plot.title} ({mark})") for plot in finding.plots]
    each = "each " if len(virtual) > 1 else ""
    # XLA uses all cores for a product, regardless of its flags.
    part = "with all cores of the CPU, which JAX cannot divide" if framework == "jax" else "one core of the CPU"
    note = f"Measured on {mark} ({each}{part}), because this machine has too few GPUs."
    return replace(finding, conclusion=f"{finding.conclusion} {note}", tables=tables, plots=plots)


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
                path.write_text(f"{trials}\n" if is_json else page(report), encoding="utf-8")
            if self.folder is not None and report.results and (finding := report.results[-1].finding) is not None:
                name = f"{report.results[-1].experiment}-{report.results[-1].framework}"
                for number, plot in enumerate(finding.plots):
                    path = self.folder / "plots" / f"{name}-{number + 1}.svg"
                    path.write_text(svg(plot), encoding="utf-8")
                    save_png(plot, path.with_suffix(".png"))
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


def page(report: Report) -> str:
    """The whole file."""
    title, results = "manyhands lab", report.results
    contents = "".join(
        f'<li><a href="#{_anchor(result)}">{escape(result.question)}</a> '
        f'<span class="small">{result.framework}{"" if result.status == "done" else f", {result.status}"}</span></li>'
        for result in results
    )
    body = [
        f"<h1>{title}</h1>",
        *(f'<p class="small">{escape(line)}</p>' for line in _facts(report)),
        f"<nav><ol>{contents}</ol></nav>" if len(results) > 1 else "",
        *(_card(result) for result in results),
    ]
    return page_of(title, "\n".join(part for part in body if part), _STYLE)


def _facts(report: Report) -> list[str]:
    """Where and when the report was made."""
    host = report.host
    cores = f"{host['usable_cores']} of {host['cores']} cores" if "cores" in host else ""
    lines = [f"{report.date}, manyhands {report.manyhands}{', quick (small sizes)' if report.quick else ''}"]
    lines.append(f"{host.get('name', 'unknown processor')}, {cores}")
    for framework in report.frameworks:
        devices = ", ".join(f"{row['device']} ({row['name']})" for row in framework.get("devices", []))
        lines.append(f"{framework['framework']} {framework.get('version', '')}: {devices}")
    return lines


def _card(result: Result) -> str:
    parts = [
        f'<section class="card" id="{_anchor(result)}"><h2>{escape(result.question)}</h2>',
        f'<p class="small">{escape(result.experiment)}, {result.framework}, {result.seconds:.0f} s. '
        f"{escape(result.exercise)}</p>",
    ]
    if result.why:
        kind = "failed" if result.status == "failed" else "small"
        parts.append(f'<p class="{kind}">{escape(result.status)}: {escape(result.why)}</p>')
    if result.finding is not None:
        parts.append(f'<p class="conclusion">{escape(result.finding.conclusion)}</p>')
        parts += [_image(plot) for plot in result.finding.plots]
        parts += [_table(table) for table in result.finding.tables]
        parts += [f'<p class="small">{escape(note)}</p>' for note in result.finding.notes]
    return "".join(parts) + "</section>"


def _image(plot: Plot) -> str:
    """As an image, so that the page's style does not affect it."""
    data = base64.b64encode(svg(plot).encode()).decode()
    caption = f'<p class="small">{escape(plot.title)}</p>' if plot.kind == "drawing" else ""
    return f'{caption}<img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}">'


def _table(table: Table) -> str:
    def cells(tag: str, texts: list[str], names: list[str]) -> str:
        kinds = ["", *[' class="figure"'] * (len(texts) - 1)]
        return "".join(
            f'<{tag}{kind} data-name="{escape(name)}">{escape(text)}</{tag}>'
            for kind, text, name in zip(kinds, texts, names, strict=True)
        )

    headers = list(table.headers)
    rows = "".join(f"<tr>{cells('td', list(row), headers)}</tr>" for row in table.rows)
    head = f"<caption>{escape(table.title)}</caption><thead><tr>{cells('th', headers, headers)}</tr></thead>"
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def _anchor(result: Result) -> str:
    return f"{result.experiment}-{result.framework}"
