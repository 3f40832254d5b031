"""Peak memory for any batch size, from two steps of different batch sizes.

A step allocates and frees the same memories in the same order for every batch size. Only their sizes differ, and each
size is a linear function of the batch size. So the memory in use at each moment of a step is linear, too, and the peak
is the highest of these lines: for a small batch it may be in the optimizer, for a large batch at the end of the forward
pass. Only the few lines that are the highest for some batch size are kept.

For example, x takes 1 byte per sample and a weight's gradient 10 bytes: first x is in use, then both, then only the
gradient. The line of both is always the highest: 10 bytes, plus 1 per sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.predict.profile import Memory, MemoryLine, from_mapping


@dataclass(frozen=True, slots=True)
class History:
    """The memories of a step: allocations (1) and frees (-1) by number, and each number's size and purpose."""

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
    """The lines whose highest is the peak. From a single step, memory is taken not to depend on the batch."""
    if large is None or large.batch == small.batch:
        return [MemoryLine(several, _at_peak(small), Memory())]
    if list(small.events) != list(large.events):
        # The steps differ in their order of operations, so moments cannot be compared: one line through both peaks.
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
    """The numbers of the lines that are the highest at some batch size of 1 or more."""
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
    """The memory in use after these events, by purpose."""
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
