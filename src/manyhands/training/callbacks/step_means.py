"""Figures of steps as each callback gets them: means over the steps since it last got some.

A device counts sums over an epoch. Two callbacks ask for them after every 2 and every 3 steps; an epoch has 4::

    step        1     2     3     4   |  5     6
    every=2          1-2         3-4  |       5-6
    every=3                1-3        |       4-6      step 4 is carried over the end of the epoch
"""

from __future__ import annotations

import math
from typing import Any

from manyhands.training.running_sums import Figures


class StepMeans:
    """The figures that one callback has not received yet."""

    def __init__(self) -> None:
        self._carried = Figures()  # of the epochs before
        self._reported = Figures()  # of this epoch's sums

    def take(self, sums: Figures) -> dict[str, float]:
        """The means up to these sums of the epoch."""
        rest = _sum(self._carried, sums, self._reported)
        self._carried, self._reported = Figures(), sums
        return named(rest, "train")

    def end_epoch(self, sums: Figures) -> None:
        self._carried, self._reported = _sum(self._carried, sums, self._reported), Figures()

    def state(self) -> list[Any]:
        return [sums.as_json() for sums in (self._carried, self._reported)]

    def restore(self, state: list[Any]) -> None:
        self._carried, self._reported = (Figures.from_json(sums) for sums in state)


def named(figures: Figures, part: str) -> dict[str, float]:
    """Loss and, where there are classes to predict, accuracy by name: train_loss, train_acc."""
    means = {f"{part}_loss": figures.loss}
    return {**means, f"{part}_acc": figures.accuracy} if figures.counted else means


def _sum(carried: Figures, sums: Figures, reported: Figures) -> Figures:
    loss = carried.loss_sum + sums.loss_sum - reported.loss_sum
    return Figures(
        loss if math.isfinite(loss) else math.nan,
        carried.correct + sums.correct - reported.correct,
        carried.count + sums.count - reported.count,
        counted=sums.counted or carried.counted,
    )
