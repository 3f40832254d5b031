"""The picture of a run: loss and accuracy over the epochs, of training and of validation.

Every training with ``run=`` has a :class:`Picture`, which draws it into the run's folder.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands import files
from manyhands.errors import PackageMissing
from manyhands.training.callbacks.callback import Callback, Row, Training
from manyhands.training.checkpoints.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

LOSS, ACCURACY, INK = "#4e79a7", "#e15759", "#444444"
# The colour says what is drawn, the line of which data: solid of training, dashed of validation.
_LINES = {  # key: label, style, colour
    "train_loss": ("train loss", "-", LOSS),
    "val_loss": ("val loss", "--", LOSS),
    "train_acc": ("train acc", "-", ACCURACY),
    "val_acc": ("val acc", "--", ACCURACY),
}
_LOSSES = ("train_loss", "val_loss")
_FEW = 25  # points; fewer are also drawn as dots, and a single one could not be seen without
_NICE = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_INTERVALS = 5  # of both axes, so that one grid serves both


def curves(rows: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> Path:
    """Draw the losses (left axis) and accuracies (right axis) over the epochs; the file's ending says how.

    A row needs not have every key. What is missing, None or not a number is left out; without any accuracy, as in a
    regression, there is no right axis.
    """
    figure = _figure(rows, title)
    path = Path(path)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".") or "png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, picture.getvalue())
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
    across = _across(rows)
    points = {key: points for key in _LINES if (points := _points(rows, across, key))[0]}
    right = left.twinx() if any(key not in _LOSSES for key in points) else None
    lines = []
    for key in points:
        axes = left if right is None or key in _LOSSES else right
        lines.append(_draw(axes, key, *points[key]))
    _format_x_axis(left, across, max((x for xs, _ in points.values() for x in xs), default=1.0))
    _format_loss_axis(left, [y for key in _LOSSES for y in points.get(key, ((), ()))[1]])
    if right is not None:
        _format_accuracy_axis(right)
    if lines:
        figure.legend(
            handles=lines,
            loc="outside lower center",
            ncols=len(lines),
            handlelength=3.0,
            columnspacing=1.6,
            frameon=False,
            fontsize="small",
        )
    else:
        left.text(0.5, 0.5, "no figures yet", transform=left.transAxes, ha="center", va="center", color="grey")
    if title:
        left.set_title(title, fontsize="medium", pad=10, color=INK)
    return figure


def _across(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figures are drawn over: epochs; steps, where an epoch has several rows."""
    epochs = [row["epoch"] for row in rows if _is_number(row.get("epoch"))]
    return "step" if len(set(epochs)) < len(epochs) and all("step" in row for row in rows) else "epoch"


def _points(rows: Sequence[Mapping[str, Any]], across: str, key: str) -> tuple[list[float], list[float]]:
    pairs: list[tuple[Any, Any]] = [(row.get(across), row.get(key)) for row in rows]
    good = [(float(x), float(y)) for x, y in pairs if _is_number(x) and _is_number(y)]
    return [x for x, _ in good], [y for _, y in good]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw(axes: Axes, key: str, x: list[float], y: list[float]) -> Line2D:
    label, style, colour = _LINES[key]
    validation = key.startswith("val_")
    (line,) = axes.plot(
        x,
        y,
        linestyle=style,
        color=colour,
        linewidth=1.8,
        marker="o" if len(x) <= _FEW else None,
        markersize=4.5,
        markerfacecolor="white" if validation else colour,
        markeredgewidth=1.4,
        label=f"{label} {y[-1]:.3g}" if key in _LOSSES else f"{label} {y[-1]:.3f}",
        clip_on=False,  # an accuracy of 1 lies on the edge
        zorder=3 if validation else 2.5,
    )
    return line


def _format_x_axis(axes: Axes, name: str, last: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(name, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0.02)
    axes.set_xlim(left=0.0, right=None if last > 1.0 else 2.0)  # the points of a single epoch stand in the middle
    axes.grid(visible=True, axis="x", alpha=0.3, linewidth=0.7)
    axes.tick_params(axis="x", colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c8c8c8")


def _format_loss_axis(axes: Axes, losses: list[float]) -> None:
    axes.set_ylabel("loss", color=LOSS)
    axes.tick_params(axis="y", colors=LOSS)
    axes.grid(visible=True, axis="y", alpha=0.3, linewidth=0.7)
    if losses and min(losses) >= 0.0 and max(losses) > 0.0:
        interval = _nice(max(losses) / _INTERVALS)
        axes.set_ylim(0.0, _INTERVALS * interval)
        axes.set_yticks([index * interval for index in range(_INTERVALS + 1)])


def _format_accuracy_axis(axes: Axes) -> None:
    axes.set_ylabel("accuracy", color=ACCURACY)
    axes.tick_params(axis="y", colors=ACCURACY)
    axes.set_ylim(0.0, 1.0)
    axes.set_yticks([index / _INTERVALS for index in range(_INTERVALS + 1)])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _nice(least: float) -> float:
    """The smallest round number that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in _NICE if factor * power >= least), 10.0 * power)


_EVERY = 15.0  # seconds between two drawings: each takes a part of one


class Picture(Callback):
    """Draws ``curves.png``, from the first epoch on; a training is worth more than its picture, so nothing fails here.

    While the training runs it is drawn now and then between two epochs, and once more at the end.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._drawn, self._before = time.monotonic(), 0

    def on_fit_start(self, training: Training) -> None:
        self._drawn, self._before = time.monotonic(), len(training.rows)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        if time.monotonic() - self._drawn > _EVERY:
            self._draw(training)

    def on_fit_end(self, training: Training) -> None:
        reason = self._draw(training)
        if reason is not None and training.result is not None:
            training.result.notes.append(f"no picture: {reason}")

    def _draw(self, training: Training) -> str | None:
        """Why there is no picture; None where there is one, or nothing new to draw."""
        if training.run is None or len(training.rows) == self._before:
            return None
        devices = [] if training.result is None else training.result.devices
        title = f"{self.title} on {', '.join(devices)}" if devices else self.title
        try:
            curves(training.rows, RunFolder(training.run).plot_path, title=title)
        except Exception as error:  # whatever drawing raises
            return str(error)
        finally:
            self._drawn = time.monotonic()
        return None
