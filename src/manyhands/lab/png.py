"""Draws a plot as PNG with matplotlib, for documents that do not take SVG."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.amounts import seconds
from manyhands.lab.finding import Plot
from manyhands.lab.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLE = 64  # characters of a title in one line
_DASHES = ("--", ":", "-.") * 4


def draw(plot: Plot, path: Path) -> Path | None:
    """Returns the path, or None if matplotlib is not installed or the plot is a drawing, which is already SVG."""
    if plot.kind == "drawing":
        return None
    try:
        # Not pyplot: its current figure and its backend belong to the user's program.
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = {
        "bar": len(plot.series) * len(plot.series[0].x) if plot.series else 1,
        "line": 8,
        "timeline": 2 * len({span.lane for span in plot.spans}),
    }[plot.kind]
    figure = Figure(figsize=(7.0, 1.6 + 0.4 * rows), layout="constrained")
    axes = figure.add_subplot()
    {"bar": _bars, "line": _lines, "timeline": _timeline}[plot.kind](axes, plot)
    axes.set_title(textwrap.fill(plot.title, _TITLE), fontsize="medium")
    figure.savefig(path, dpi=120)
    return path


def _bars(axes: Axes, plot: Plot) -> None:
    height = 0.8 / max(1, len(plot.series))
    for number, series in enumerate(plot.series):
        places = [position + number * height for position in range(len(series.x))]
        axes.barh(places, series.y, height * 0.9, color=COLOURS[number % len(COLOURS)], label=series.name)
        for place, dots in zip(places, series.spread, strict=False):
            axes.plot(dots, [place] * len(dots), ".", color="black", markersize=4)
    middle = height * (len(plot.series) - 1) / 2
    axes.set_yticks(
        [position + middle for position in range(len(plot.series[0].x))], [str(x) for x in plot.series[0].x]
    )
    axes.invert_yaxis()
    for bound, dashes in zip(plot.bounds, _DASHES, strict=False):
        axes.axvline(bound.value, color="black", linestyle=dashes, linewidth=1, label=bound.name)
    axes.set_xlabel(plot.y_label)
    if plot.log_y:
        axes.set_xscale("log")
    if plot.unit == "s":
        axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value else "0")
    if len(plot.series) > 1 or plot.bounds:
        axes.legend(fontsize="small", frameon=False)


def _lines(axes: Axes, plot: Plot) -> None:
    for number, series in enumerate(plot.series):
        axes.plot([float(x) for x in series.x], series.y, "o-", color=COLOURS[number % len(COLOURS)], label=series.name)
    for bound, dashes in zip(plot.bounds, _DASHES, strict=False):
        axes.axhline(bound.value, color="black", linestyle=dashes, linewidth=1, label=bound.name)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.log_x:
        axes.set_xscale("log")
        measured = sorted({float(x) for series in plot.series for x in series.x})
        axes.set_xticks(measured if len(measured) <= 8 else axes.get_xticks(), minor=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    if plot.log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter(lambda value, _: _minor(value, plot) if high < 30 * low else "")
    if plot.unit == "s":
        axes.yaxis.set_major_formatter(lambda value, _: seconds(value) if value else "0")
    elif plot.log_y:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(visible=True, alpha=0.35)
    axes.legend(fontsize="small", frameon=False)


def _minor(value: float, plot: Plot) -> str:
    """Labels between powers of ten: only at 2 and 5 times the power."""
    if f"{value:.0e}"[0] not in "25":
        return ""
    return seconds(value) if plot.unit == "s" else f"{value:g}"


def _timeline(axes: Axes, plot: Plot) -> None:
    lanes = list(dict.fromkeys(span.lane for span in plot.spans))
    names = list(dict.fromkeys(span.name for span in plot.spans))
    begin = min((span.start for span in plot.spans), default=0.0)
    for number, name in enumerate(names):
        for span in (span for span in plot.spans if span.name == name):
            width = span.stop - span.start
            axes.barh(lanes.index(span.lane), width, 0.7, span.start - begin, color=COLOURS[number % len(COLOURS)])
        # matplotlib omits names that begin with an underscore, such as _to_copy, from the legend.
        axes.plot([], [], "s", color=COLOURS[number % len(COLOURS)], label=name.lstrip("_") or name)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value else "0")
    # Beside the boxes: a busy lane leaves no room between them.
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
