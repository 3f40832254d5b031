"""Labels where the loss is the cross-entropy of class scores: they are looked at on the host, before a device has them.

What a framework makes of wrong labels differs: some say what an operation would not take, some take the nearest class,
some give a loss that is no number long after. Here it is said once, of what the user gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import BadLabels


def out_of_range(low: Any, high: Any, classes: int) -> BadLabels:
    """The error for labels that a model has no output for."""
    cure = ". If they begin at 1, subtract 1: y - 1" if low > 0 and high == classes else ""
    return BadLabels(
        f"labels go from {low} to {high}, but the model has {classes} outputs: they must be 0 to {classes - 1}{cure}"
    )


@dataclass(frozen=True)
class ClassLabels:
    """Refuses labels that are no class numbers, and those that the model has no output for."""

    classes: int
    ignored: int | None = None
    floats: bool = False  # whether the loss takes 3.0 for class 3
    columns: bool = False  # whether the loss takes labels of shape (n, 1)

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Look at the last of the arrays (inputs, labels)."""
        labels = arrays[-1]
        if not len(labels):
            return
        self._check_kind(labels)
        if labels.ndim != 1 and not (self.columns and labels.shape[1:] == (1,)):
            cure = "give y.reshape(-1)" if labels.shape[1:] == (1,) else "give one, or another loss="
            raise BadLabels(f"labels have shape {labels.shape}, and one class number per sample is needed: {cure}")
        labels = labels[np.isfinite(labels)]  # a loss that is no number is said in its own place
        labels = labels[labels != self.ignored] if self.ignored is not None else labels
        if not len(labels):
            return
        low, high = labels.min(), labels.max()
        if low < 0 or high >= self.classes:
            raise out_of_range(low, high, self.classes)

    def _check_kind(self, labels: NDArray[Any]) -> None:
        if labels.ndim == 2 and labels.shape[1] == self.classes > 1:
            raise BadLabels(
                f"labels have shape {labels.shape}, and one class number per sample is needed: if they are one-hot, "
                "give y.argmax(1)"
            )
        if labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and self.floats):
            return
        raise BadLabels(
            f"labels are {labels.dtype.name}, and class numbers are whole, 0 to {self.classes - 1}: give "
            "y.astype('int32'); targets that are no classes need another loss="
        )
