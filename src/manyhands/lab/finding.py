"""The outcome of an experiment: tables, plots, and the sentence that its figures support. Plain data, no framework."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.amounts import seconds as seconds
from manyhands.schedule.pictures.timeline import Span

Kind = Literal["bar", "line", "timeline", "drawing"]

_CLEAR = 0.05  # smaller differences are not reported as a difference


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed repetition: the way that ran, its settings, and the mean seconds of one of ``calls`` calls in a row."""

    name: str
    settings: Mapping[str, Any]
    seconds: float
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """Headers and rows; every cell is text, shown unchanged. ``seconds(0.012)`` writes a time with its unit."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one bar in each group. ``x`` are numbers in a line plot and names of the groups in a bar plot.

    ``spread``: the raw figures behind each ``y``, drawn as dots.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    spread: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """A reference line: what cannot be exceeded, or what would be perfect."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Plot:
    """The description of a plot. The kind ``timeline`` draws ``spans``, bars and lines draw ``series``; a ``drawing``
    is finished SVG, such as ``mh.parallel(fn).draw`` writes.

    A bar plot has one group of bars for each ``x``; ``y_label`` says what the length of a bar means. Times are in
    seconds, and ``unit="s"`` writes them with their unit.
    """

    kind: Kind
    title: str
    series: Sequence[Series] = ()
    spans: Sequence[Span] = ()
    x_label: str = ""
    y_label: str = ""
    unit: str = ""
    log_x: bool = False
    log_y: bool = False
    drawing: str = ""
    bounds: Sequence[Bound] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """An experiment's answer. ``conclusion`` is written from the figures: other figures, another sentence."""

    conclusion: str
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = field(default=())

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Finding:
        plots = [
            Plot(
                **{
                    **plot,
                    "series": [Series(**series) for series in plot["series"]],
                    "spans": [Span(**span) for span in plot["spans"]],
                    "bounds": [Bound(**bound) for bound in plot["bounds"]],
                }
            )
            for plot in data["plots"]
        ]
        return cls(data["conclusion"], [Table(**table) for table in data["tables"]], plots, data["notes"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times as fast one way is as another: the median of the rounds, the lowest and the highest."""

    ratio: float
    lowest: float
    highest: float

    @property
    def faster(self) -> bool:
        """Clearly faster: in the middle by more than 5%, and in (almost) every round."""
        return self.ratio > 1 + _CLEAR and self.lowest > 1

    @property
    def slower(self) -> bool:
        return self.ratio < 1 - _CLEAR and self.highest < 1

    def __str__(self) -> str:
        """In words that follow a way's name.

        >>> str(Comparison(1.92, 1.8, 2.0)), str(Comparison(0.5, 0.4, 0.6)), str(Comparison(1.2, 0.9, 1.5))
        ('is 1.92 times as fast', 'takes 2 times as long', 'is 0.9 to 1.5 times as fast, round by round')
        """
        if self.faster:
            return f"is {self.ratio:.3g} times as fast"
        if self.slower:
            return f"takes {1 / self.ratio:.3g} times as long"
        return f"is {self.lowest:.2g} to {self.highest:.2g} times as fast, round by round"


class Times(dict[str, list[float]]):
    """Seconds of each way in every round; :meth:`Bench.trials` returns them."""

    def median(self, name: str) -> float:
        return statistics.median(self[name])

    def compare(self, name: str, to: str) -> Comparison:
        """How many times as fast ``name`` is as ``to``, round by round: the two ran right after each other.

        With five rounds or more, the range leaves out the lowest and the highest: they may come from a busy moment.
        """
        ratios = sorted(base / time for time, base in zip(self[name], self[to], strict=True))
        middle = statistics.median(ratios)
        if len(ratios) >= 5:
            ratios = ratios[1:-1]
        return Comparison(middle, ratios[0], ratios[-1])

    def table(self, to: str, title: str = "") -> Table:
        """The usual table: each way, its median time with the range, and how many times as fast as ``to`` it is."""
        rows = [
            (
                name,
                seconds(self.median(name)),
                f"{seconds(min(spent))} to {seconds(max(spent))}",
                "1" if name == to else f"{self.compare(name, to).ratio:.2f}",
            )
            for name, spent in self.items()
        ]
        return Table(("way", "median", "range", f"times as fast as {to}"), rows, title)

    def bars(self, title: str, bounds: Sequence[Bound] = ()) -> Plot:
        """The usual plot: a bar for each way, with its trials as dots."""
        names = list(self)
        series = Series("time", names, [self.median(name) for name in names], [self[name] for name in names])
        return Plot("bar", title, [series], y_label="time (shorter is better)", unit="s", bounds=bounds)
