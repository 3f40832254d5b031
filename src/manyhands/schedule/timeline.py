"""The timeline of a run, measured or simulated: which task ran on which lane, and when. Saved as JSON, PNG or SVG."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.files import new_figure, to_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The colours of operations, the same in every picture.
_FAMILIES = {
    "#4e79a7": ("mm", "matmul", "dot", "linear", "einsum", "dense", "fully_connected"),
    "#f28e2b": ("conv",),
    "#59a14f": ("norm",),
    "#b07aa1": ("attention", "softmax", "loss"),
    "#9c755f": ("copy", "memcpy", "device_put"),
    "#499894": ("pool",),
    "#b6992d": ("sum", "mean", "var", "amax", "argmax"),
    "#79706e": ("cat", "stack", "index", "gather", "embedding"),
    "#e15759": ("relu", "gelu", "sigmoid", "silu", "tanh", "threshold"),
}
_OTHERS = ("#d37295", "#a0568c", "#6b8e23", "#2f6b9a", "#c4763b", "#8a6fa8", "#3d7a5a", "#a8554e")


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval on a lane, in seconds."""

    name: str
    lane: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    spans: tuple[Span, ...]
    title: str = ""

    @property
    def seconds(self) -> float:
        return max((span.stop for span in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def lanes(self) -> list[str]:
        return _in_order(self.spans)

    def save(self, path: str | Path) -> Path:
        """A trace for Perfetto or chrome://tracing (``.json``), or a picture (``.png``, ``.svg``)."""
        path = checked_path(path)
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(self.trace_events()))
        else:
            _picture(self.spans, path, f"{self.title}, {self.seconds * 1e3:.3g} ms" if self.title else "")
        return path

    def trace_events(self) -> dict[str, object]:
        lanes = {lane: number for number, lane in enumerate(self.lanes())}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        spans = [
            {"ph": "X", "name": span.name, "pid": 0, "tid": lanes[span.lane]}
            | {"ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
            for span in self.spans
        ]
        return {"traceEvents": names + spans, "displayTimeUnit": "ms"}


def checked_path(path: str | Path) -> Path:
    """The path, if a timeline can be written there; an error otherwise."""
    return to_write(path, "timeline", (".svg", ".png", ".json"))


def _in_order(spans: Sequence[Span]) -> list[str]:
    """The lanes by name, their numbers by value: lane 10 comes after lane 2."""
    return sorted({span.lane for span in spans}, key=lambda lane: [(len(part), part) for part in lane.split()])


def _picture(spans: Sequence[Span], path: Path, title: str) -> None:
    instead = f", or write {path.with_suffix('.json').name!r}, a trace for ui.perfetto.dev, which needs nothing"
    figure = new_figure(path.name, (12.0, 1.6 + 0.5 * len(_in_order(spans))), instead)
    gantt(figure, spans).set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)


def gantt(figure: Figure, spans: Sequence[Span]) -> Axes:
    """Draw a row for each lane and a bar for each span, coloured by what it is."""
    from matplotlib.patches import Patch

    lanes = _in_order(spans)
    work: dict[str, float] = {}
    for span in spans:
        work[span.name] = work.get(span.name, 0.0) + span.stop - span.start
    kinds = sorted(work, key=lambda kind: -work[kind])
    colours = {kind: colour_of(kind) for kind in kinds}
    axes = figure.add_subplot()
    begin = min((span.start for span in spans), default=0.0)
    for row, lane in enumerate(lanes):
        in_lane = [span for span in spans if span.lane == lane]
        axes.broken_barh(
            [((span.start - begin) * 1e3, (span.stop - span.start) * 1e3) for span in in_lane],
            (row - 0.4, 0.8),
            facecolors=[colours[span.name] for span in in_lane],
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", alpha=0.3)
    handles = [Patch(color=colours[kind], label=kind) for kind in kinds[:12]]  # those that take longest
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    return axes


def colour_of(operation: str) -> str:
    """Each family (products, convolutions, ...) has a colour; any other operation gets one by its name.

    >>> colour_of("addmm") == colour_of("bmm") != colour_of("convolution")
    True
    """
    name = operation.lower()
    for colour, words in _FAMILIES.items():
        if any(word in name for word in words):
            return colour
    return _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]
