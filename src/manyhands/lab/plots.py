"""Draws a plot with matplotlib, as SVG that follows the reader's light or dark mode."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from manyhands.amounts import seconds
from manyhands.lab.finding import Plot
from manyhands.schedule.pictures.timeline import gantt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that can be told apart without red and green (after Okabe and Ito), on white and on black.
_COLOURS = ("#2f8fc4", "#d5702a", "#2a9d78", "#b0689c", "#a58a1f", "#7a68b3", "#888888", "#4c5fb0")
_INK = "#222222"
_FAR = 50  # times as long as the shortest bar: then bars have a logarithmic axis
_STYLE = "<style>svg { color: #222; } @media (prefers-color-scheme: dark) { svg { color: #eee; } }</style>"


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
    return f'{head}<svg role="img" aria-label="{escape(plot.title)}" {tag}>{_STYLE}{body}'


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
    for series, colour in zip(plot.series, itertools.cycle(_COLOURS), strict=False):
        axes.plot(list(series.x), list(series.y), "o-", color=colour, label=series.name)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel("time")
    axes.set_xscale("log")
    axes.set_xticks(sorted({x for series in plot.series for x in series.x}), minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(
        lambda value, _: seconds(value) if high < 100 * low and f"{value:.0e}"[0] in "25" else ""
    )
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.grid(visible=True, alpha=0.35)
