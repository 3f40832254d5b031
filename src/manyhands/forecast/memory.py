"""Peak memory for any batch size, from two steps of different batch sizes.

A step makes the same operations for every batch size, and the memory in use after each of them is a linear function of
the batch size. So the peak is the highest of these lines: for a small batch it may be in the optimizer, for a large
batch at the end of the forward pass. Only the few lines that are the highest for some batch size are kept.

For example, x takes 1 byte per sample and a weight's gradient 10 bytes: first x is in use, then both, then only the
gradient. The line of both is always the highest: 10 bytes, plus 1 per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "batch")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use on one device. ``activations``: all that has no other name, the workspace of operations, too."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    batch: float = 0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in MEMORY_PARTS))

    def as_dict(self) -> dict[str, int]:
        return {name: round(getattr(self, name)) for name in MEMORY_PARTS}


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The memory in use at one moment of a step: fixed bytes, and bytes per sample of a device's shard.

    ``several``: gradients are views of buckets, as with several ranks.
    """

    several: bool
    fixed: Memory
    per_sample: Memory

    def at(self, batch: float) -> Memory:
        fixed, slopes = self.fixed, self.per_sample
        return Memory(*(max(0.0, getattr(fixed, name) + batch * getattr(slopes, name)) for name in MEMORY_PARTS))


Steps = tuple[int, Sequence[Memory]]  # a batch size, and the memory in use after each operation of a step


def memory_lines(several: bool, small: Steps, large: Steps | None = None) -> list[MemoryLine]:
    """The lines whose highest is the peak. From a single step, memory is taken not to depend on the batch."""
    if large is None or large[0] == small[0]:
        return [MemoryLine(several, _peak(small[1]), Memory())]
    if len(small[1]) != len(large[1]):  # other operations: moments cannot be compared, so one line through both peaks
        return [_line(several, small[0], _peak(small[1]), large[0], _peak(large[1]))]
    lines = [_line(several, small[0], low, large[0], high) for low, high in zip(small[1], large[1], strict=True)]
    return [lines[number] for number in _highest([(line.per_sample.total, line.fixed.total) for line in lines])]


def _peak(moments: Sequence[Memory]) -> Memory:
    return max(moments, key=lambda memory: memory.total)


def _line(several: bool, x0: int, first: Memory, x1: int, second: Memory) -> MemoryLine:
    slopes = Memory(*((getattr(second, name) - getattr(first, name)) / (x1 - x0) for name in MEMORY_PARTS))
    fixed = Memory(*(getattr(first, name) - x0 * getattr(slopes, name) for name in MEMORY_PARTS))
    return MemoryLine(several, fixed, slopes)


def _highest(lines: Sequence[tuple[float, float]]) -> list[int]:
    """The numbers of the lines (slope, value at zero) that are the highest at some batch size of 1 or more."""
    best: list[int] = []
    current = max(range(len(lines)), key=lambda n: (lines[n][0] + lines[n][1], lines[n][0]))
    while True:
        best.append(current)
        slope, intercept = lines[current]
        crossings = [
            ((intercept - other_intercept) / (other_slope - slope), -other_slope, number)
            for number, (other_slope, other_intercept) in enumerate(lines)
            if other_slope > slope
        ]
        if not crossings:
            return best
        current = min(crossings)[2]
