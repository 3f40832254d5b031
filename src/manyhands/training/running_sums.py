"""Loss and accuracy as sums over samples, which every framework counts on its devices; and what NaN in them means."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.errors import LossIsNotANumber
from manyhands.training.data.sources import not_finite

if TYPE_CHECKING:
    from manyhands.training.data.order import Position

Sum = tuple[float, float]  # of values times their weights, and of the weights


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over samples; the first step whose loss was NaN or infinite; whether correct predictions are counted.

    ``logged``: of what a model logs itself, by name, the sum and its weight.
    """

    loss_sum: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    bad_step: int | None = None
    counted: bool = False
    logged: Mapping[str, Sum] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def accuracy(self) -> float:
        return self.correct / self.count if self.count and self.counted else math.nan

    def with_weight(self, weight: float) -> Totals:
        """These totals, where the sum of losses is to be divided by a weight and not by the number of samples."""
        return dataclasses.replace(self, loss_sum=self.loss_sum * self.count / weight if weight else math.nan)

    def as_json(self) -> list[Any]:
        """For a checkpoint, which is only written while every loss was a number."""
        logged = {name: [or_none(total), weight] for name, (total, weight) in self.logged.items()}
        return [or_none(self.loss_sum), self.correct, self.count, self.counted, logged]

    def negative(self) -> Totals:
        """What takes these totals off when it is added."""
        logged = {name: (-total, -weight) for name, (total, weight) in self.logged.items()}
        return Totals(-self.loss_sum, -self.correct, -self.count, counted=self.counted, logged=logged)

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Totals:
        loss, correct, count, counted, logged = values
        sums = {name: (_or_nan(total), weight) for name, (total, weight) in logged.items()}
        return cls(_or_nan(loss), correct, count, None, counted, sums)


def add(parts: Sequence[Totals]) -> Totals:
    """The sums of some totals, as those of all processes."""
    bad = [part.bad_step for part in parts if part.bad_step is not None]
    logged: dict[str, Sum] = {}
    for part in parts:
        for name, (total, weight) in part.logged.items():
            before = logged.get(name, (0.0, 0.0))
            logged[name] = before[0] + total, before[1] + weight
    return Totals(
        sum(part.loss_sum for part in parts),
        sum(part.correct for part in parts),
        sum(part.count for part in parts),
        min(bad, default=None),
        any(part.counted for part in parts),
        logged,
    )


def totals_of_process(parts: Sequence[Totals], rank: int, size: int) -> Totals:
    """What one process of a resumed job begins with. On another number of them the first takes all."""
    if len(parts) == size:
        return parts[rank]
    everything = add(parts)
    if rank == 0:
        return everything
    return Totals(counted=everything.counted, logged=dict.fromkeys(everything.logged, (0.0, 0.0)))


def or_none(value: float) -> float | None:
    """A float as JSON can hold it."""
    return value if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def means_by_name(totals: Totals, part: str) -> dict[str, float]:
    """Loss and, where there are classes to predict, accuracy by name: train_loss, train_acc; and what was logged."""
    accuracy = {f"{part}_acc": totals.accuracy} if totals.counted else {}
    return {**means_of_logged(totals), f"{part}_loss": totals.loss, **accuracy}


def means_of_logged(totals: Totals) -> dict[str, float]:
    """What the model itself has logged, by name."""
    return {name: total / weight for name, (total, weight) in totals.logged.items() if weight}


# NaN

_HINT = (
    "If the loss is divided by a count (mh.LossSum, or a mean over the labels that are not ignored), the count of this "
    "batch may be 0: give at least 1. Else a smaller learning rate or gradient_clip_val may help; "
    "step=mh.Step(on_nan='continue') continues without the batch"
)
_LISTED = 8  # samples of a batch that an error lists


class NanCheck:
    """Finds which step had a NaN loss or gradient, and which samples were in its batch."""

    def __init__(self, learner: Any, position: Position) -> None:
        """``learner`` may have ``bad_samples`` (which of these samples are NaN, in words) and ``why_no_numbers``."""
        self._learner, self._position = learner, position
        self._continues = position.settings.step.on_nan == "continue"

    def check(self, totals: Totals) -> None:
        """Raise an error where a step had no finite loss, unless the job is to continue."""
        if totals.bad_step is None or self._continues:
            return
        why: str | None = getattr(self._learner, "why_no_numbers", lambda: None)()  # PyTorch's, with fp16
        if why is not None:
            raise LossIsNotANumber(f"{why}. It is step {totals.bad_step}")
        step = totals.bad_step
        raise LossIsNotANumber(f"{self.describe(step)}. {self._bad_numbers(step) or _HINT}")

    def describe(self, step: int) -> str:
        """Which step of the current epoch it is, and which samples are in its batch."""
        numbers = self._position.samples_of(step)
        which = f"batch {self._position.batch_of(step)} of the loader"
        if numbers is not None:
            which = f"samples {', '.join(map(str, numbers[:_LISTED]))}{', ...' if len(numbers) > _LISTED else ''}"
        epoch = self._position.cursor.epoch + 1
        return f"the loss or a gradient of step {step} is not a number (epoch {epoch}, {which})"

    def _bad_numbers(self, step: int) -> str | None:
        """Which of the data are NaN or infinite: of arrays all are looked at, of a dataset the batch's samples."""
        look, numbers = getattr(self._learner, "bad_samples", None), self._position.samples_of(step)
        with contextlib.suppress(Exception):  # the error about the loss matters more
            words = not_finite(self._position.data)
            return look(numbers) if words is None and look is not None and numbers is not None else words
        return None
