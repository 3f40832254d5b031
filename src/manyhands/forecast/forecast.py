"""The forecast, for people (tables, a plot) and for programs (rows, a dict)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.amounts import count_of, seconds
from manyhands.files import new_figure, to_write
from manyhands.forecast import scaling
from manyhands.forecast.links import Link
from manyhands.forecast.profile import MEMORY_PARTS, SCHEMA, MemoryByPart, Profile
from manyhands.forecast.scaling import TERMS, Assumptions, Row
from manyhands.schedule.memory import megabytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The names of a row's values in JSON.
_JSON = {
    **{"devices": "devices", "base_devices": "base", "batch_size": "batch", "batch_size_per_device": "shard"},
    **{"step_seconds": "seconds", "samples_per_second": "rate", "speed_up": "speed_up", "efficiency": "efficiency"},
    **{"terms_seconds": "terms", "worst_term": "worst_term", "pays": "pays", "pays_from_batch_size": "pays_from"},
    **{"device_hours_per_million_samples": "device_hours", "memory_bytes": "memory", "fits": "fits"},
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """Time and memory of a step on several numbers of devices; ``print`` it, ``plot`` it, or read its ``rows``."""

    profile: Profile
    link: Link
    rows: tuple[Row, ...]
    assumptions: Assumptions
    per_device: bool = False

    @classmethod
    def of(
        cls,
        profile: Profile,
        link: Link,
        devices: Sequence[int],
        batch: int | None = None,
        *,
        per_device: bool = False,
        assumptions: Assumptions = Assumptions(),  # noqa: B008 - frozen
    ) -> Forecast:
        """Forecast from a profile and a link; see :func:`manyhands.forecast.scaling.rows`."""
        rows = scaling.rows(profile, link, devices, batch, per_device=per_device, assumptions=assumptions)
        return cls(profile, link, tuple(rows), assumptions, per_device)

    @property
    def headline(self) -> str:
        """The answer in one line: what does not pay comes first."""
        several = [row for row in self.rows if row.devices > row.base]
        problems = [row for row in self.rows if row.fits is False]
        words = []
        if problems:
            words.append(self._does_not_fit(problems))
        losing = [row for row in several if not row.pays]
        if losing:
            words.append(_losses_in_words(losing[0], losing))
        best = max((row for row in several if row.pays), key=lambda row: row.devices, default=None)
        if best is not None:
            words.append(f"{_devices(best.devices)} pay: {_times(best)}, {best.efficiency:.0%} efficient")
        if words:
            return "; ".join(words) + "."
        first = self.rows[0]
        return f"{_devices(first.devices)} take{'s' * (first.devices == 1)} {seconds(first.seconds)} a step."

    def _does_not_fit(self, problems: Sequence[Row]) -> str:
        counts = ", ".join(str(row.devices) for row in problems)
        first = min(problems, key=lambda row: row.devices)
        assert first.memory is not None
        assert self.profile.capacity is not None
        shared = self.profile.devices_sharing(min(first.devices, self.link.per_node))
        most = scaling.largest_shard(self.profile, self.link, first.devices)
        where = "one device" if first.devices == 1 else f"each of {first.devices} devices"
        return (
            f"the batch does not fit on {counts} device{'s' if counts != '1' else ''}: "
            f"{count_of(first.shard, 'sample')} on {where} would take {megabytes(first.memory.total)} of "
            f"{megabytes(self.profile.capacity / shared)}, "
            + (f"{most:,} would fit" if most else "and not even one sample would fit")
        )

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            values: dict[str, Any] = {name: getattr(row, attribute) for name, attribute in _JSON.items()}
            if row.memory is not None:
                values["memory_bytes"] = {**row.memory.as_dict(), "peak": round(row.memory.total)}
            rows.append(values)
        return {
            "schema": SCHEMA,
            "headline": self.headline,
            "model": self.profile.name,
            "device": self.profile.device,
            "device_memory_bytes": self.profile.capacity,
            "gradient_bytes": self.profile.gradient_bytes,
            "scaling": "weak" if self.per_device else "strong",
            "link": self.link.as_dict(),
            "rows": rows,
        }

    def __str__(self) -> str:
        profile, step = self.profile, self.profile.step(self.profile.batch_size)
        base = profile.devices
        whose = "each device's" if base == 1 else f"each {base} devices'"
        sizes = f"{whose} batch" if self.per_device else "batch size"
        device = profile.device if base == 1 else f"{base} x {profile.device}"
        parts = ", ".join(f"{name} {seconds(getattr(step, name))}" for name in ("forward", "backward", "optimizer"))
        # A step that was timed as a whole has no optimizer: its parts are assumed.
        shares = f" ({parts})" if step.optimizer else ""
        turns = profile.kind == "cpu" and self.link.per_node > 1 and len(self.rows) > 1
        lines = [
            *([_TAKE_TURNS, ""] if turns else []),
            self.headline,
            "",
            f"{profile.name}, {sizes} {profile.batch_size}, on {device}: {seconds(step.total)} a step{shares}",
            f"gradients: {megabytes(profile.gradient_bytes)} in {count_of(len(profile.buckets), 'bucket')}; "
            f"link {self.link}",
            "",
            *_table([_time_cells(row) for row in self.rows]),
        ]
        if measured := [(row, row.memory) for row in self.rows if row.memory is not None]:
            shown = [name for name in MEMORY_PARTS if any(getattr(memory, name) for _, memory in measured)]
            lines += ["", *_table([_memory_cells(row, memory, shown) for row, memory in measured])]
            if profile.capacity is not None:
                lines.append(f"memory of {profile.device}: {megabytes(profile.capacity)}")
        pays = self.assumptions.pays
        lines += [
            "",
            f"pays: at least {pays:.0%} of each device's time goes into training"
            f"{'' if base == 1 else f', where {base} devices count as 100%'}; pays from: the smallest batch size for "
            "which it does; device-hours: for a million samples",
        ]
        return "\n".join([*lines, *profile.notes])

    def plot(self, path: str | Path) -> Path:
        """Draw speed-up and memory over the number of devices; ``.png`` or ``.svg``."""
        return _draw(self, path)


_TAKE_TURNS = (
    "A forecast for devices that take turns on the cores of one CPU. For GPUs measure where one is: --save-profile "
    "FILE there, --profile FILE here."
)


def _losses_in_words(first: Row, losing: Sequence[Row]) -> str:
    counts = ", ".join(str(row.devices) for row in losing)
    words = f"{counts} device{'s' if counts != '1' else ''} do not pay"
    worst = "" if first.worst_term is None else f", {first.worst_term} eats most of the gain"
    detail = f"{_devices(first.devices)} give {_times(first)}{worst}"
    cure = f"; they pay from batch size {first.pays_from:,} on" if first.pays_from is not None else ""
    return f"{words}: {detail}{cure}"


def _devices(count: int) -> str:
    return count_of(count, "device")


def _times(row: Row) -> str:
    return f"{row.speed_up:.3g} times the speed of {'one' if row.base == 1 else row.base}"


def _time_cells(row: Row) -> dict[str, str]:
    """A line of the first table: what stands below each title."""
    worst, alone = row.worst_term, row.devices == row.base
    return {
        "devices": f"{row.devices:,}",
        "each": f"{row.shard:,}",
        "step": seconds(row.seconds),
        "samples/s": f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
        "speed-up": f"{row.speed_up:.2f}",
        "efficiency": f"{row.efficiency:.0%}",
        "most lost by": "-" if worst is None else f"{worst} {row.terms[worst] / row.seconds:.0%}",
        "pays": "-" if alone else "yes" if row.pays else "no",
        "pays from": "-" if alone else "never" if row.pays_from is None else f"{row.pays_from:,}",
        "device-hours": f"{row.device_hours:.3g}",
    }


def _memory_cells(row: Row, memory: MemoryByPart, parts: Sequence[str]) -> dict[str, str]:
    cells = {"devices": f"{row.devices:,}", "peak memory": megabytes(memory.total)}
    cells |= {name: megabytes(getattr(memory, name)) for name in parts}
    return cells | {"fits": "-" if row.fits is None else "yes" if row.fits else "no"}


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


# The plot: speed-up, where the time goes, and memory, over the number of devices

# Colours that can be told apart without red and green (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#000000")


def check_plot(path: str | Path) -> Path:
    """The path, if a plot can be drawn and written to it; checked before anything is measured."""
    path = to_write(path, "plot", (".png", ".svg"))
    new_figure("the plot", (1.0, 1.0))
    return path


def _draw(forecast: Forecast, path: str | Path) -> Path:
    path = check_plot(path)
    has_memory = any(row.memory is not None for row in forecast.rows)
    count = 3 if has_memory else 2
    figure = new_figure("the plot", (4.6 * count, 4.6))
    axes: Any = figure.subplots(1, count)
    _speed_up(axes[0], forecast)
    shares = [{name: row.terms.get(name, 0) / row.seconds for name in ("computing", *TERMS)} for row in forecast.rows]
    _bars(axes[1], forecast, shares, "part of a device's time", 1.0)
    axes[1].set_ylim(0, 1)
    if has_memory:
        _memory(axes[2], forecast)
    profile = forecast.profile
    first = forecast.rows[0]
    sizes = f"batch size {first.shard} a device" if forecast.per_device else f"batch size {first.batch}"
    figure.suptitle(f"{profile.name}, {sizes}, {forecast.link.name} (forecast)", fontsize="medium")
    figure.savefig(path, dpi=150)
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
    axes.set(xlabel="devices", ylabel=f"times the speed of {count_of(base, 'device')}")
    axes.grid(visible=True, alpha=0.35)
    axes.legend(frameon=False)


def _bars(
    axes: Axes, forecast: Forecast, stacks: Sequence[Mapping[str, float]], label: str, scale: float
) -> list[float]:
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
    axes.set(xlabel="devices", ylabel=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize="small")
    return tops


def _memory(axes: Axes, forecast: Forecast) -> None:
    stacks = [(row.memory or MemoryByPart()).as_dict() for row in forecast.rows]
    tops = _bars(axes, forecast, stacks, "MB on each device", 1e-6)
    capacity = forecast.profile.capacity
    if capacity is not None and capacity * 1e-6 < 4 * max(tops):
        axes.axhline(capacity * 1e-6, color="black", linestyle="--", linewidth=1)
        axes.annotate("memory of the device", (0, capacity * 1e-6), va="bottom", fontsize="small")
