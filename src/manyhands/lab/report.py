"""The report: the results of all experiments as data, as text for a terminal, and as one HTML page.

The page is self-contained: no network, light and dark, readable on a phone.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from manyhands.amounts import seconds
from manyhands.audit.reports.html import page_of
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Table, Trial
from manyhands.schedule.timeline import gantt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = 3

# Colours that can be told apart without red and green (after Okabe and Ito), on white and on black.
_COLOURS = ("#2f8fc4", "#d5702a", "#2a9d78", "#b0689c", "#a58a1f", "#7a68b3", "#888888", "#4c5fb0")
_INK = "#222222"
_FAR = 50  # times as long as the shortest bar: then bars have a logarithmic axis
_SVG_STYLE = "<style>svg { color: #222; } @media (prefers-color-scheme: dark) { svg { color: #eee; } }</style>"
_STYLE = """
.card { border-top: 1px solid var(--line); margin-top: 2rem; }
.conclusion { font-weight: 600; } .failed { color: var(--wait); font-weight: 600; }
nav li { margin: 0.2rem 0; } caption { text-align: left; font-weight: 600; padding: 0.4rem; }
img { width: 100%; max-width: 46rem; display: block; margin: 0.5rem 0 1.5rem; }
"""


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """``why``: the reason if it did not finish. ``virtual``: the virtual devices that replaced real ones."""

    experiment: str
    question: str
    exercise: str
    framework: str
    status: str  # done, not measured, failed or interrupted
    seconds: float = 0.0
    finding: Answer | None = None
    trials: Sequence[Trial] = ()
    virtual: Sequence[str] = ()
    why: str = ""

    @classmethod
    def of(cls, experiment: Experiment, framework: str, status: str, **rest: Any) -> ExperimentResult:
        return cls(experiment.name, experiment.question, experiment.exercise, framework, status, **rest)


@dataclass(frozen=True, slots=True)
class LabReport:
    """The results in the order of their runs, and the machine they were measured on."""

    quick: bool
    host: Mapping[str, Any]
    frameworks: Sequence[Mapping[str, Any]]  # as `manyhands devices --json` lists them
    results: Sequence[ExperimentResult] = ()
    manyhands: str = ""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def with_result(self, result: ExperimentResult) -> LabReport:
        return replace(self, results=[*self.results, result])

    def as_json(self) -> str:
        return json.dumps(_finite({"schema": SCHEMA, **asdict(self)}), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same data, with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mark_virtual(finding: Answer, virtual: Sequence[str], framework: str) -> Answer:
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


def text(result: ExperimentResult) -> str:
    """A result as text for a terminal."""
    lines = [f"{result.question} ({result.experiment}, {result.framework}, {result.seconds:.0f} s)"]
    lines.append(f"  {result.exercise}")
    if result.why:
        lines.append(f"  {result.status}: {result.why}")
    if result.finding is not None:
        for table in result.finding.tables:
            lines += ["", *_table_lines(table)]
        lines += ["", f"  {result.finding.conclusion}", *(f"  {note}" for note in result.finding.notes)]
    return "\n".join(lines) + "\n"


def _table_lines(table: Table) -> list[str]:
    rows = [list(table.headers), *map(list, table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {table.title}"] if table.title else []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def page(report: LabReport) -> str:
    """The HTML page."""
    title, host = "manyhands lab", report.host
    contents = "".join(
        f'<li><a href="#{_anchor(result)}">{escape(result.question)}</a> '
        f'<span class="small">{result.framework}{"" if result.status == "done" else f", {result.status}"}</span></li>'
        for result in report.results
    )
    facts = [f"{report.date}, manyhands {report.manyhands}{', quick (small sizes)' if report.quick else ''}"]
    facts.append(f"{host['name']}, {host['usable_cores']} of {host['cores']} cores")
    for framework in report.frameworks:
        devices = ", ".join(f"{row['device']} ({row['name']})" for row in framework["devices"])
        facts.append(f"{framework['framework']} {framework['version']}: {devices}")
    body = [
        f"<h1>{title}</h1>",
        *(f'<p class="small">{escape(line)}</p>' for line in facts),
        f"<nav><ol>{contents}</ol></nav>" if len(report.results) > 1 else "",
        *(_card(result) for result in report.results),
    ]
    return page_of(title, "\n".join(part for part in body if part), _STYLE)


def _card(result: ExperimentResult) -> str:
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
    return f'{caption}<div class="wide"><img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}"></div>'


def _table(table: Table) -> str:
    def cells(tag: str, texts: Sequence[str]) -> str:
        kinds = ["", *[' class="figure"'] * (len(texts) - 1)]
        return "".join(
            f'<{tag}{kind} data-name="{escape(name)}">{escape(text)}</{tag}>'
            for kind, text, name in zip(kinds, texts, table.headers, strict=True)
        )

    rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    head = f"<caption>{escape(table.title)}</caption><thead><tr>{cells('th', table.headers)}</tr></thead>"
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def _anchor(result: ExperimentResult) -> str:
    return f"{result.experiment}-{result.framework}"


# Plots: SVG that follows the reader's light or dark mode, drawn with matplotlib


def svg(plot: Plot) -> str:
    """The plot as the text of an SVG file."""
    if plot.kind == "drawing":
        return plot.drawing
    stream = io.StringIO()
    with _draw(plot) as figure:
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    head, drawn = stream.getvalue().split("<svg ", 1)
    tag, body = drawn.split(">", 1)
    body = body.replace(_INK, "currentColor")
    return f'{head}<svg role="img" aria-label="{escape(plot.title)}" {tag}>{_SVG_STYLE}{body}'


@contextmanager
def _draw(plot: Plot) -> Iterator[Figure]:
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: its backend belongs to the user's program

    style: Any = {f"{part}color": _INK for part in ("text.", "xtick.", "ytick.", "axes.label", "axes.edge")}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11, "svg.hashsalt": "manyhands"}
    with matplotlib.rc_context(style):
        lanes = {span.lane for span in plot.spans}
        rows = 6 if plot.kind == "line" else len(lanes or plot.series[0].x)
        figure = Figure(figsize=(8.0, 1.7 + 0.45 * rows), layout="constrained")
        if plot.kind == "timeline":
            gantt(figure, plot.spans)
        else:
            (_bars if plot.kind == "bar" else _lines)(figure.add_subplot(), plot)
        figure.suptitle(textwrap.fill(plot.title, 70), fontsize="medium", fontweight="bold")
        if figure.axes[0].get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
        yield figure


def _bars(axes: Axes, plot: Plot) -> None:
    (series,) = plot.series
    places = list(range(len(series.x)))
    axes.barh(places, series.y, 0.7, color=_COLOURS[0])
    for place, value in zip(places, series.y, strict=True):
        dots = series.spread[place] if series.spread else []
        axes.plot(dots, [place] * len(dots), ".", color=_INK, markersize=4)
        axes.annotate(seconds(value), (max([value, *dots]), place), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [str(x) for x in series.x])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    for name, value in plot.bounds.items():
        axes.axvline(value, color=_INK, linestyle="--", linewidth=1, label=f"{name}: {seconds(value)}")
    axes.set_xlabel("time (shorter is better)")
    if max(series.y) > _FAR * min(series.y):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value))


def _lines(axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_prop_cycle(color=_COLOURS)
    for series in plot.series:
        axes.plot(list(series.x), list(series.y), "o-", label=series.name)
    axes.set(xlabel=plot.x_label, ylabel="time", xscale="log", yscale="log")
    axes.set_xticks(sorted({x for series in plot.series for x in series.x}), minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.grid(visible=True, alpha=0.35)
