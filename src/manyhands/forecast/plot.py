"""The picture of a forecast: speed-up, where the time goes, and memory, over the number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.amounts import counted
from manyhands.errors import BadProfile, PackageMissing
from manyhands.files import to_write
from manyhands.forecast.profile import MEMORY_PARTS
from manyhands.forecast.scaling import TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyhands.forecast.forecast import Forecast

# Colours that can be told apart without red and green (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#000000")


def place(path: str | Path) -> Path:
    """The path, if a plot can be drawn and written to it; checked before anything is measured."""
    path = to_write(path, "plot", (".png", ".svg"))
    _figure_class()
    return path


def _figure_class() -> type[Figure]:
    """Not pyplot: its current figure and its backend belong to the user's program."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissing(
            "the plot cannot be drawn: matplotlib is not installed. Run: pip install matplotlib"
        ) from error
    return Figure


def draw(forecast: Forecast, path: str | Path) -> Path:
    path = place(path)
    has_memory = any(row.memory is not None for row in forecast.rows)
    count = 3 if has_memory else 2
    figure = _figure_class()(figsize=(4.6 * count, 4.6), layout="constrained")
    axes: Any = figure.subplots(1, count)
    _speed_up(axes[0], forecast)
    shares = [{name: row.terms.get(name, 0) / row.seconds for name in ("computing", *TERMS)} for row in forecast.rows]
    _bars(axes[1], forecast, shares, "part of a device's time", 1.0)
    axes[1].set_ylim(0, 1)
    if has_memory:
        _memory(axes[2], forecast)
    profile = forecast.profile
    sizes = f"batch size {forecast.rows[0].shard} a device" if forecast.per_device else "batch size "
    sizes += "" if forecast.per_device else f"{forecast.rows[0].batch}"
    figure.suptitle(f"{profile.name}, {sizes}, {forecast.link.name} (forecast)", fontsize="medium")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadProfile(f"the plot cannot be written to {str(path)!r}: {error.strerror or error}") from error
    return path


def _speed_up(axes: Axes, forecast: Forecast) -> None:
    rows = sorted(forecast.rows, key=lambda row: row.devices)
    devices = [row.devices for row in rows]
    base = rows[0].base
    axes.plot(devices, [count / base for count in devices], "--", color="#999999", label="perfect")
    axes.plot(devices, [row.speed_up for row in rows], color=_COLOURS[0], label="forecast")
    for pays, marker, label in ((True, "o", "pays"), (False, "X", "does not pay")):
        chosen = [row for row in rows if row.pays is pays and row.devices > base]
        if chosen:
            colour = _COLOURS[0] if pays else _COLOURS[5]
            points = [row.devices for row in chosen], [row.speed_up for row in chosen]
            axes.plot(*points, marker, color=colour, label=label, markersize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(devices, [f"{count}" for count in devices])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("devices")
    axes.set_ylabel(f"times the speed of {counted(base, 'device')}")
    axes.grid(visible=True, alpha=0.35)
    axes.legend(frameon=False)


def _bars(axes: Axes, forecast: Forecast, stacks: list[dict[str, float]], label: str, scale: float) -> list[float]:
    """Stacked bars, one for each number of devices; parts too small to see are left out."""
    places = range(len(stacks))
    tops = [0.0] * len(stacks)
    highest = max(sum(stack.values()) for stack in stacks)
    names = [name for name in stacks[0] if any(stack[name] > 0.003 * highest for stack in stacks)]
    for name, colour in zip(names, _COLOURS, strict=False):
        heights = [max(0.0, stack[name]) * scale for stack in stacks]
        axes.bar(places, heights, bottom=tops, label=name, color=colour, width=0.7)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    axes.set_xticks(places, [f"{row.devices}" for row in forecast.rows])
    axes.set_xlabel("devices")
    axes.set_ylabel(label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize="small")
    return tops


def _memory(axes: Axes, forecast: Forecast) -> None:
    stacks = [
        {name: getattr(row.memory, name) if row.memory is not None else 0.0 for name in MEMORY_PARTS}
        for row in forecast.rows
    ]
    tops = _bars(axes, forecast, stacks, "MB on each device", 1e-6)
    capacity = forecast.profile.capacity
    if capacity is not None and capacity * 1e-6 < 4 * max(tops):
        axes.axhline(capacity * 1e-6, color="black", linestyle="--", linewidth=1)
        axes.annotate("memory of the device", (0, capacity * 1e-6), va="bottom", fontsize="small")
