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

LOSS, ACCURACY = "#4e79a7", "#e15759"
# The colour says what is drawn, the line of which data: solid of training, dashed of validation.
_LINES = {  # key: label, style, colour
    "train_loss": ("train loss", "-", LOSS),
    "val_loss": ("val loss", "--", LOSS),
    "train_acc": ("train acc", "-", ACCURACY),
    "val_acc": ("val acc", "--", ACCURACY),
}
_LOSSES = ("train_loss", "val_loss")
_FEW = 25  # points; fewer are also drawn as dots, and a single one could not be seen without
_EVERY = 15.0  # seconds between two drawings: each takes a part of one


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
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise PackageMissing(
            "the curves cannot be drawn: matplotlib is not installed. Run: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    left = figure.add_subplot()
    across = _across(rows)
    points = {key: points for key in _LINES if (points := _points(rows, across, key))[0]}
    right = left.twinx() if any(key not in _LOSSES for key in points) else None
    lines = [_draw(left if right is None or key in _LOSSES else right, key, *points[key]) for key in points]
    last = max((x for xs, _ in points.values() for x in xs), default=1.0)
    left.set_xlabel(across)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlim(0.0, max(last * 1.02, 2.0))  # the point of a single epoch stands in the middle
    left.set_ylabel("loss", color=LOSS)
    left.grid(visible=True, alpha=0.3, linewidth=0.7)
    losses = [y for key in _LOSSES for y in points.get(key, ((), ()))[1]]
    if losses and min(losses) >= 0.0 and max(losses) > 0.0:
        left.set_ylim(0.0, max(losses) * 1.05)
    if right is not None:
        right.set_ylabel("accuracy", color=ACCURACY)
        right.set_ylim(0.0, 1.0)
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize="small")
    else:
        left.text(0.5, 0.5, "no metrics yet", transform=left.transAxes, ha="center", va="center", color="grey")
    if title:
        left.set_title(title, fontsize="medium")
    return figure


def _across(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the metrics are drawn over: epochs; steps, where an epoch has several rows."""
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
    (line,) = axes.plot(
        x,
        y,
        linestyle=style,
        color=colour,
        marker="o" if len(x) <= _FEW else None,
        markerfacecolor="white" if key.startswith("val_") else colour,
        label=f"{label} {y[-1]:.3g}" if key in _LOSSES else f"{label} {y[-1]:.3f}",
        clip_on=False,  # an accuracy of 1 lies on the edge
    )
    return line


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
