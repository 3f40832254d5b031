"""Loss and accuracy as sums over samples, which every framework counts on its devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over samples; the first step whose loss was NaN or infinite; whether correct predictions are counted."""

    loss_sum: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    bad_step: int | None = None
    counted: bool = False

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def accuracy(self) -> float:
        return self.correct / self.count if self.count and self.counted else math.nan

    def weighed(self, weight: float) -> Figures:
        """These figures, where the sum of losses is to be divided by a weight and not by the number of samples."""
        return dataclasses.replace(self, loss_sum=self.loss_sum * self.count / weight if weight else math.nan)

    def as_json(self) -> list[float | bool | None]:
        """For a checkpoint, which is only written while every loss was a number."""
        return [or_none(self.loss_sum), self.correct, self.count, self.counted]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Figures:
        loss, correct, count, counted = values
        return cls(math.nan if loss is None else loss, correct, count, None, counted)


def together(parts: Sequence[Figures]) -> Figures:
    """The sums of the figures of all processes."""
    bad = [part.bad_step for part in parts if part.bad_step is not None]
    return Figures(
        sum(part.loss_sum for part in parts),
        sum(part.correct for part in parts),
        sum(part.count for part in parts),
        min(bad, default=None),
        any(part.counted for part in parts),
    )


def of_one(parts: Sequence[Figures], rank: int, size: int) -> Figures:
    """What one process of a resumed job begins with. On another number of them the first takes all."""
    if len(parts) == size:
        return parts[rank]
    everything = together(parts)
    return everything if rank == 0 else Figures(counted=everything.counted)


def or_none(value: float) -> float | None:
    """A float as JSON can hold it."""
    return value if math.isfinite(value) else None
