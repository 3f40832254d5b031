"""The forecast, for people (a table, a plot) and for programs (rows, a dict)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.amounts import counted
from manyhands.forecast import scaling
from manyhands.forecast.links import Link
from manyhands.forecast.profile import MEMORY_PARTS, SCHEMA, Profile
from manyhands.forecast.scaling import Assumptions, Row
from manyhands.schedule.memory import megabytes


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
            words.append(_losing(losing[0], losing))
        best = max((row for row in several if row.pays), key=lambda row: row.devices, default=None)
        if best is not None:
            words.append(f"{_devices(best.devices)} pay: {_times(best)}, {best.efficiency:.0%} efficient")
        if words:
            return "; ".join(words) + "."
        first = self.rows[0]
        return f"{_devices(first.devices)} take{'s' * (first.devices == 1)} {_time(first.seconds)} a step."

    def _does_not_fit(self, problems: Sequence[Row]) -> str:
        counts = ", ".join(str(row.devices) for row in problems)
        first = min(problems, key=lambda row: row.devices)
        assert first.memory is not None
        assert self.profile.capacity is not None
        shared = self.profile.sharing(min(first.devices, self.link.per_node))
        most = scaling.largest_shard(self.profile, self.link, first.devices)
        where = "one device" if first.devices == 1 else f"each of {first.devices} devices"
        return (
            f"the batch does not fit on {counts} device{'s' if counts != '1' else ''}: "
            f"{counted(first.shard, 'sample')} on {where} would take {megabytes(first.memory.total)} of "
            f"{megabytes(self.profile.capacity / shared)}, "
            + (f"{most:,} would fit" if most else "and not even one sample would fit")
        )

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                "devices": row.devices,
                "base_devices": row.base,
                "batch_size": row.batch,
                "batch_size_per_device": row.shard,
                "step_seconds": row.seconds,
                "samples_per_second": row.rate,
                "speed_up": row.speed_up,
                "efficiency": row.efficiency,
                "terms_seconds": row.terms,
                "worst_term": row.worst_term,
                "pays": row.pays,
                "pays_from_batch_size": row.pays_from,
                "device_hours_per_million_samples": row.device_hours,
                "memory_bytes": None
                if row.memory is None
                else {**row.memory.as_dict(), "peak": round(row.memory.total)},
                "fits": row.fits,
            }
            for row in self.rows
        ]
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
        parts = f" (forward {_time(step.forward)}, backward {_time(step.backward)}, optimizer {_time(step.optimizer)})"
        if not step.optimizer:  # a step that was timed as a whole: its parts are assumed
            parts = ""
        lines = [
            self.headline,
            "",
            f"{profile.name}, {sizes} {profile.batch_size}, on {device}: {_time(step.total)} a step{parts}",
            f"gradients: {megabytes(profile.gradient_bytes)} in {counted(len(profile.buckets), 'bucket')}; "
            f"link {self.link}",
            "",
            *_table(_time_columns(self.rows)),
        ]
        if any(row.memory is not None for row in self.rows):
            lines += ["", *_table(_memory_columns(self.rows))]
            if profile.capacity is not None:
                lines.append(f"memory of {profile.device}: {megabytes(profile.capacity)}")
        pays = self.assumptions.pays
        lines += [
            "",
            f"pays: at least {pays:.0%} of each device's time goes into training"
            f"{'' if base == 1 else f', where {base} devices count as 100%'}; pays from: the smallest batch size for "
            "which it does; device-hours: for a million samples",
        ]
        if profile.kind == "cpu" and self.link.per_node > 1 and len(self.rows) > 1:
            lines.append(
                "The devices of a node take turns on the cores of this CPU. For GPUs measure where one is: "
                "--save-profile FILE there, --profile FILE here."
            )
        return "\n".join([*lines, *profile.notes])

    def plot(self, path: str | Path) -> Path:
        """Draw speed-up and memory over the number of devices; ``.png`` or ``.svg``."""
        from manyhands.forecast import plot

        return plot.draw(self, path)


def _losing(first: Row, losing: Sequence[Row]) -> str:
    counts = ", ".join(str(row.devices) for row in losing)
    words = f"{counts} device{'s' if counts != '1' else ''} do not pay"
    worst = "" if first.worst_term is None else f", {first.worst_term} eats most of the gain"
    if first.speed_up < 1:
        detail = (
            f"{_devices(first.devices)} are slower than {_base(first)} ({first.speed_up:.2f} times its speed{worst})"
        )
    else:
        detail = f"{_devices(first.devices)} give {_times(first)}{worst}"
    cure = f"; they pay from batch size {first.pays_from:,} on" if first.pays_from is not None else ""
    return f"{words}: {detail}{cure}"


def _devices(count: int) -> str:
    return counted(count, "device")


def _times(row: Row) -> str:
    return f"{row.speed_up:.3g} times the speed of {_base(row)}"


def _base(row: Row) -> str:
    return "one" if row.base == 1 else str(row.base)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _time_columns(rows: Sequence[Row]) -> list[list[str]]:
    head = [
        "devices",
        "each",
        "step",
        "samples/s",
        "speed-up",
        "efficiency",
        "most lost by",
        "pays",
        "pays from",
        "device-hours",
    ]
    body = []
    for row in rows:
        worst = row.worst_term
        body.append(
            [
                f"{row.devices:,}",
                f"{row.shard:,}",
                _time(row.seconds),
                f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
                f"{row.speed_up:.2f}",
                f"{row.efficiency:.0%}",
                "-" if worst is None else f"{worst} {row.terms[worst] / row.seconds:.0%}",
                "-" if row.devices == row.base else "yes" if row.pays else "no",
                "-" if row.devices == row.base else "never" if row.pays_from is None else f"{row.pays_from:,}",
                f"{row.device_hours:.3g}",
            ]
        )
    return [head, *body]


def _memory_columns(rows: Sequence[Row]) -> list[list[str]]:
    shown = [name for name in MEMORY_PARTS if any(row.memory and getattr(row.memory, name) for row in rows)]
    body = []
    for row in rows:
        if row.memory is not None:
            figures = [megabytes(getattr(row.memory, name)) for name in shown]
            fits = "-" if row.fits is None else "yes" if row.fits else "no"
            body.append([f"{row.devices:,}", megabytes(row.memory.total), *figures, fits])
    return [["devices", "peak memory", *shown, "fits"], *body]


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
