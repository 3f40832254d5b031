"""The outcome of an experiment: tables, plots, and the sentence that its figures support. Plain data, no framework."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.amounts import seconds as seconds
from manyhands.errors import NotMeasured
from manyhands.schedule.timeline import Span

_CLEAR = 0.05  # smaller differences are not reported as a difference
EFFICIENCY = 1.1  # of a bound that was measured too: a little more than all of it is noise


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed repetition: the method that ran, its settings, and the mean seconds of ``calls`` calls in a row."""

    name: str
    settings: Mapping[str, Any]
    seconds: float
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """Headers and rows; every cell is text, shown unchanged."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the bars of a plot, whose ``x`` are names then; ``spread`` has the trials behind each ``y``."""

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    spread: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """Times: ``series`` as bars or lines, the ``spans`` of a timeline; or a ``drawing``, finished SVG.

    ``bounds`` are reference lines beside bars: what cannot be exceeded, or what would be perfect.
    """

    kind: Literal["bar", "line", "timeline", "drawing"]
    title: str
    series: Sequence[Series] = ()
    spans: Sequence[Span] = ()
    x_label: str = ""
    drawing: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """An experiment's answer. ``conclusion`` is written from the figures: other figures, another sentence."""

    conclusion: str
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, conclusion: str, *shown: Table | Plot, notes: Sequence[str] = ()) -> Answer:
        """An answer whose tables and plots are given in one row."""
        tables = [part for part in shown if isinstance(part, Table)]
        return cls(conclusion, tables, [part for part in shown if isinstance(part, Plot)], notes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as fast one method is as another: by their medians, and in the slowest and the fastest round."""

    ratio: float
    lowest: float
    highest: float

    @property
    def faster(self) -> bool:
        """Clearly faster: by their medians by more than 5%, and in (almost) every round."""
        return self.ratio > 1 + _CLEAR and self.lowest > 1

    @property
    def slower(self) -> bool:
        return self.ratio < 1 - _CLEAR and self.highest < 1

    def __str__(self) -> str:
        """In words that follow a method's name.

        >>> str(Comparison(1.92, 1.8, 2.0)), str(Comparison(0.5, 0.4, 0.6)), str(Comparison(1.2, 0.9, 1.5))
        ('is 1.92 times as fast', 'takes 2.00 times as long', 'is 0.90 to 1.50 times as fast, round by round')
        """
        if self.faster:
            return f"is {self.ratio:.2f} times as fast"
        if self.slower:
            return f"takes {1 / self.ratio:.2f} times as long"
        return f"is {self.lowest:.2f} to {self.highest:.2f} times as fast, round by round"


class Times(dict[str, list[float]]):
    """Seconds of each method in every round; :meth:`Bench.trials` returns them."""

    def median(self, name: str) -> float:
        return statistics.median(self[name])

    def compare(self, name: str, to: str, most: float = math.inf) -> Comparison:
        """How many times as fast ``name`` is as ``to``; more than ``most``, as the devices allow, is implausible.

        With five rounds or more, the range leaves out the lowest and the highest: they may come from a busy moment.
        """
        ratio = self.median(to) / self.median(name)
        if round(ratio, 2) > most:  # as it is printed
            raise NotMeasured(f"{name} was {ratio:.2f} times as fast as {to}, and {most:g} times is the most possible")
        ratios = sorted(base / time for time, base in zip(self[name], self[to], strict=True))
        if len(ratios) >= 5:
            ratios = ratios[1:-1]
        return Comparison(ratio, ratios[0], ratios[-1])

    def table(self, to: str, title: str = "", parts: Collection[str] = ()) -> Table:
        """Each method, its median time with the range, and its speed beside ``to``; ``parts`` of the work have none."""
        rows = []
        for name, spent in self.items():
            ends = f"{seconds(min(spent))} to {seconds(max(spent))}"
            ratio = "" if name in parts else f"{self.median(to) / self.median(name):.2f}"
            rows.append((name, seconds(self.median(name)), ends, ratio))
        return Table(("method", "median", "range", f"times as fast as {to}"), rows, title)

    def bars(self, title: str, bounds: Mapping[str, float] | None = None) -> Plot:
        """A bar for each method, with its trials as dots."""
        series = Series("time", list(self), [self.median(name) for name in self], list(self.values()))
        return Plot("bar", title, [series], bounds=bounds or {})

    def shown(
        self, title: str, to: str, bounds: Mapping[str, float] | None = None, parts: Collection[str] = ()
    ) -> tuple[Table, Plot]:
        """The table and the bars, under one title."""
        return self.table(to, title, parts), self.bars(title, bounds)


class Sweep(dict[Any, Times]):
    """The times of the same methods at several sizes, or for several jobs."""

    def methods(self) -> list[str]:
        return list(next(iter(self.values())))

    def table(self, head: str, title: str, gain: str = "", to: str = "") -> Table:
        """A row for each size: the median of each method and, of the method ``gain``, how many times as fast."""
        rows = [[str(size), *(seconds(times.median(name)) for name in times)] for size, times in self.items()]
        if gain:
            for row, times in zip(rows, self.values(), strict=True):
                row.append(f"{times.median(to) / times.median(gain):.2f}")
        return Table([head, *self.methods(), *([f"times as fast as {to}"] if gain else [])], rows, title)

    def lines(self, title: str, x_label: str) -> Plot:
        """The time of each method by size."""
        lines = [Series(name, list(self), [times.median(name) for times in self.values()]) for name in self.methods()]
        return Plot("line", title, lines, x_label=x_label)

    def shown(self, title: str, head: str, x_label: str, gain: str = "", to: str = "") -> tuple[Table, Plot]:
        """The table and the lines, under one title."""
        return self.table(head, title, gain, to), self.lines(title, x_label)

    def in_words(self, name: str, to: str, most: float = math.inf) -> str:
        """A sentence: at which sizes a method is clearly faster than another, and at which slower."""
        gains = {size: times.compare(name, to, most) for size, times in self.items()}
        faster = {size: gain.ratio for size, gain in gains.items() if gain.faster}
        slower = {size: 1 / gain.ratio for size, gain in gains.items() if gain.slower}
        parts = [
            f"{word} than {to} at {', '.join(map(str, found))} (up to {max(found.values()):.2f} times)"
            for word, found in (("faster", faster), ("slower", slower))
            if found
        ]
        return f"{name}: {'; '.join(parts) or f'no clear difference from {to}'}."
