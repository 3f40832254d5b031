"""The picture of a run: loss and accuracy over the epochs."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import PackageMissing
from manyhands.training.checkpoints import atomic_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_LOSS = "#1f77b4"
_LINES = {  # key: label, style, colour
    "train_loss": ("train loss", "-", _LOSS),
    "train_acc": ("train acc", "--", "#c2417c"),
    "val_acc": ("test acc", "-.", "#2a8a3e"),
}
_FEW = 25  # points; fewer are also drawn as dots, and a single one could not be seen without
_NICE = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_INTERVALS = 5  # of both axes, so that one grid serves both


def curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw `train_loss` (left axis), `train_acc` and `val_acc` (right axis) over `epoch`; the file's ending says how.

    A row needs not have every key. What is missing, None or not a number is left out.
    """
    figure = _figure(rows, title)
    path = Path(path)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".") or "png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.replace(path, picture.getvalue())
    return path


def _figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    try:
        # Not pyplot: its current figure and its backend belong to the user's program.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissing(
            "the curves cannot be drawn: matplotlib is not installed. Run: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    points = {key: _points(rows, key) for key in _LINES}
    lines = [_draw(left if key == "train_loss" else right, key, *points[key]) for key in _LINES if points[key][0]]
    _dress(left, right, points["train_loss"][1])
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), handlelength=3.2, frameon=False)
    else:
        left.text(0.5, 0.5, "no figures yet", transform=left.transAxes, ha="center", va="center", color="grey")
    if title:
        left.set_title(title, fontsize="medium", pad=10)
    return figure


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    pairs: list[tuple[Any, Any]] = [(row.get("epoch"), row.get(key)) for row in rows]
    good = [(float(x), float(y)) for x, y in pairs if _is_number(x) and _is_number(y)]
    return [x for x, _ in good], [y for _, y in good]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw(axes: Axes, key: str, x: list[float], y: list[float]) -> Line2D:
    label, style, colour = _LINES[key]
    (line,) = axes.plot(
        x,
        y,
        linestyle=style,
        color=colour,
        linewidth=1.8,
        marker="o" if len(x) <= _FEW else None,
        markersize=3.5,
        label=f"{label} {y[-1]:.3g}" if key == "train_loss" else f"{label} {y[-1]:.3f}",
        clip_on=key == "train_loss",  # an accuracy of 1 lies on the edge
    )
    return line


def _dress(left: Axes, right: Axes, losses: list[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    left.set_xlabel("epoch")
    left.set_ylabel("loss", color=_LOSS)
    left.tick_params(axis="y", colors=_LOSS)
    left.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    left.margins(x=0.02)
    left.set_xlim(left=0.0)
    right.set_ylabel("accuracy")
    right.set_ylim(0.0, 1.0)
    right.set_yticks([index / _INTERVALS for index in range(_INTERVALS + 1)])
    if losses and min(losses) >= 0.0 and max(losses) > 0.0:
        interval = _nice(max(losses) / _INTERVALS)
        left.set_ylim(0.0, _INTERVALS * interval)
        left.set_yticks([index * interval for index in range(_INTERVALS + 1)])
    left.grid(visible=True, axis="x", alpha=0.35)
    right.grid(visible=True, axis="y", alpha=0.35)
    for axes in (left, right):
        axes.spines["top"].set_visible(False)


def _nice(least: float) -> float:
    """The smallest round number that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in _NICE if factor * power >= least), 10.0 * power)
