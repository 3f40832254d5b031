"""Checks labels for cross-entropy on the host, before they go to a device.

Frameworks treat wrong labels differently: some report a failed operation, some take the nearest class, some return a
NaN loss much later. Here one error describes the user's labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.amounts import count_of
from manyhands.errors import BadLabels


@dataclass
class ClassLabels:
    """Refuses labels that are no class numbers, and those that the model has no output for.

    How many outputs there are is known when the model answers for the first time, in the first step: no pass is made to
    find out. Until then a summary of the labels is kept, and checked before the loss sees any of them.
    """

    classes: int | None = None
    ignored: int | None = None
    floats: bool = False  # whether the loss takes 3.0 for class 3
    columns: bool = False  # whether the loss takes labels of shape (n, 1)
    one_hot: bool = False  # whether the loss takes a number for each class
    _waiting: list[_Summary] = field(default_factory=list, repr=False)
    _of_no_use: bool = field(default=False, repr=False)

    def look(self, labels: NDArray[Any]) -> None:
        if not len(labels) or self._of_no_use:
            return
        summary = self._summary(labels)
        self._waiting.append(summary)  # first: the first output may come in another thread
        if self.classes is not None:
            self._waiting.clear()
            self._check(summary, self.classes)

    def learn(self, output: Sequence[Any]) -> None:
        """The shape of the model's first output: it has a column for each class."""
        if self.classes is not None or self._of_no_use:
            return
        self._of_no_use = len(output) != 2 or output[1] is None
        if not self._of_no_use:
            for summary in self._waiting:
                self._check(summary, int(output[1]))
            self.classes = int(output[1])
        self._waiting.clear()

    def _summary(self, labels: NDArray[Any]) -> _Summary:
        if labels.dtype.kind not in "iuf":
            return _Summary(labels.shape, labels.dtype)
        count_of = labels[np.isfinite(labels)]  # a NaN loss is reported elsewhere
        count_of = count_of[count_of != self.ignored] if self.ignored is not None else count_of
        limits = (count_of.min(), count_of.max()) if len(count_of) else None
        whole = labels.dtype.kind != "f" or bool((count_of == np.floor(count_of)).all())
        return _Summary(labels.shape, labels.dtype, limits, whole)

    def _check(self, labels: _Summary, classes: int) -> None:
        shape, kind = labels.shape, labels.dtype.kind
        is_one_hot = shape[1:] == (classes,) and classes > 1
        if is_one_hot and self.one_hot:
            return
        needed = f"labels have shape {shape}, and one class number per sample is needed"
        if is_one_hot:
            raise BadLabels(f"{needed}: if they are one-hot, give y.argmax(1)")
        if kind not in "iu" and not (kind == "f" and self.floats and labels.whole):
            raise BadLabels(
                f"labels are {labels.dtype.name}, and class numbers are whole, 0 to {classes - 1}: give "
                "y.astype('int32'); targets that are not classes need another loss="
            )
        if len(shape) != 1 and not (self.columns and shape[1:] == (1,)):
            raise BadLabels(f"{needed}: give {'y.reshape(-1)' if shape[1:] == (1,) else 'one, or another loss='}")
        low, high = labels.limits or (0, 0)
        if low < 0 or high >= classes:
            cure = ". If they begin at 1, subtract 1: y - 1" if low > 0 and high == classes else ""
            raise BadLabels(
                f"labels go from {low} to {high}, but the model has {count_of(classes, 'output')}: they must be 0 to "
                f"{classes - 1}{cure}"
            )


Look = Callable[[Sequence[Any]], None]  # checks the labels of a batch


def check_sources(labels: ClassLabels, label_of: Callable[[Any], Any], *sources: Any) -> Look:
    """Check the labels of arrays now; the function that is returned checks those of a loader, batch by batch.

    ``label_of``: the labels of a batch, if they are one array.
    """

    def look(batch: Sequence[Any]) -> None:
        target = label_of(batch)
        if isinstance(target, np.ndarray):
            labels.look(target)

    for source in sources:
        if source is not None and source.count is not None:
            look(source.nest(source.arrays))
    return look


@dataclass(frozen=True)
class _Summary:
    """A summary of some labels, enough to check them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    limits: tuple[Any, Any] | None = None  # the smallest and the largest that count
    whole: bool = True  # whether those that count are whole numbers
