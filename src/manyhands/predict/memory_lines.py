"""Peak memory for any batch size, from two steps of different batch sizes.

A step makes and drops the same memories in the same order whatever its batch size is; only their sizes differ, each on
a line. So at every moment of a step what is held is on a line, too, and the peak is the highest of these lines: that of
a small batch may be in the optimizer, that of a large one at the end of the forward pass. Few lines are ever the
highest; those are kept.

For example x of 1 byte a sample and a weight's gradient of 10 bytes: at first x is held, then both, then the gradient
alone. Both is always the highest: 10 bytes and 1 a sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.predict.profile import Memory, MemoryLine, from_mapping


@dataclass(frozen=True, slots=True)
class History:
    """What a step held: births (1) and deaths (-1) by number, the size of each number and what it is for."""

    batch: int
    events: Sequence[tuple[int, int]]
    sizes: Mapping[int, int]
    kinds: Mapping[int, str]

    def peak(self) -> float:
        total = most = 0.0
        for number, sign in self.events:
            total += sign * self.sizes[number]
            most = max(most, total)
        return most


def memory_lines(several: bool, small: History, large: History | None = None) -> list[MemoryLine]:
    """The lines of which the highest is the peak; of one step alone, memory that does not depend on the batch."""
    if large is None or large.batch == small.batch:
        return [MemoryLine(several, _at_peak(small), Memory())]
    if list(small.events) != list(large.events):
        # Another order of operations, so that moments cannot be compared: one line through both peaks.
        first, second = _at_peak(small), _at_peak(large)
        return [_line(several, small.batch, first, large.batch, second)]
    totals = list(zip(_totals(small), _totals(large), strict=True))
    highest = _highest([_coefficients(small.batch, low, large.batch, high) for low, high in totals])
    first_held, second_held = _held(small, highest), _held(large, highest)
    return [
        _line(several, small.batch, first_held[moment], large.batch, second_held[moment]) for moment in sorted(highest)
    ]


def _totals(history: History) -> list[int]:
    total, totals = 0, []
    for number, sign in history.events:
        total += sign * history.sizes[number]
        totals.append(total)
    return totals


def _coefficients(x0: int, y0: float, x1: int, y1: float) -> tuple[float, float]:
    """Slope and intercept of a line."""
    slope = (y1 - y0) / (x1 - x0)
    return slope, y0 - slope * x0


def _highest(lines: Sequence[tuple[float, float]]) -> set[int]:
    """The numbers of the lines that are the highest somewhere from batch size 1 on."""
    best: set[int] = set()
    x = 1.0
    current = max(range(len(lines)), key=lambda n: (lines[n][0] * x + lines[n][1], lines[n][0]))
    while True:
        best.add(current)
        slope, intercept = lines[current]
        crossings = [
            ((intercept - other_intercept) / (other_slope - slope), -other_slope, number)
            for number, (other_slope, other_intercept) in enumerate(lines)
            if other_slope > slope
        ]
        if not crossings:
            return best
        x, _, current = min(crossings)


def _at_peak(history: History) -> Memory:
    totals = _totals(history)
    moment = max(range(len(totals)), key=totals.__getitem__)
    return _held(history, {moment})[moment]


def _held(history: History, moments: set[int]) -> dict[int, Memory]:
    """What is held after these events, by what it is for."""
    held: dict[str, float] = defaultdict(float)
    by_moment = {}
    for moment, (number, sign) in enumerate(history.events):
        held[history.kinds.get(number, "activations")] += sign * history.sizes[number]
        if moment in moments:
            by_moment[moment] = from_mapping(held)
    return by_moment


def _line(several: bool, x0: int, first: Memory, x1: int, second: Memory) -> MemoryLine:
    parts = {name: _coefficients(x0, getattr(first, name), x1, getattr(second, name)) for name in first.as_dict()}
    fixed = from_mapping({name: intercept for name, (_, intercept) in parts.items()})
    return MemoryLine(several, fixed, from_mapping({name: slope for name, (slope, _) in parts.items()}))
