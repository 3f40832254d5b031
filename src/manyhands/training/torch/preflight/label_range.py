"""Refuses labels that a model has no output for: on a GPU they would break the process much later.

The number of outputs is known after the forward pass of the first step; no pass is made before. Labels are checked on
the host, where it costs next to nothing: those of arrays all at once, those of a dataset or a loader batch by batch,
before they go to the device. Until the number of outputs is known, their range is recorded; then it is compared, before
the loss sees the labels.

Where the user has not chosen a loss, targets that are neither classes nor probabilities are refused, and so is a model
with one output: its cross-entropy is always 0, and nothing would be learnt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.errors import BadLabels
from manyhands.training.data.labels import out_of_range
from manyhands.training.torch.data.batches import Batch

_CLOSE = 1e-2  # to 1: the sum of a sample's probabilities, in any precision
_ROWS = 4096  # whose sums are computed
_CURE = (
    "and the loss where none is given is cross_entropy, {}: give loss='mse' to predict numbers, or "
    "loss='bce_with_logits' for yes and no"
)


@dataclass
class LabelRange:
    """Refuses labels that are not 0 to (number of outputs - 1), except the one that the loss ignores."""

    ignored: int
    is_default: bool = False  # the user has not chosen the loss
    classes: int | None = None
    low: int = sys.maxsize  # of the labels seen so far
    high: int = -sys.maxsize

    def __call__(self, batch: Batch) -> None:
        """Look at the labels of a batch."""
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[-1], torch.Tensor):
            self.look(batch[-1])

    def look(self, labels: torch.Tensor) -> None:
        if self.is_default and labels.is_floating_point() and not _may_be_classes(labels[:_ROWS]):
            raise BadLabels(f"the targets are numbers, {_CURE.format('for class numbers or probabilities')}")
        if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
            return
        labels = labels[labels != self.ignored]
        if not len(labels):
            return
        # Recorded first: the first output may come in another thread, between these lines.
        self.low, self.high = min(self.low, int(labels.min())), max(self.high, int(labels.max()))
        if self.classes is not None:
            self._check(self.classes)

    def learn(self, output: Any) -> None:
        """The first output: it has a column per class."""
        if self.is_default and isinstance(output, torch.Tensor) and output.dim() > 1 and output.shape[1] == 1:
            raise BadLabels(f"the model has one output, {_CURE.format('which takes one for each class')}")
        if not isinstance(output, torch.Tensor) or output.dim() != 2:
            return
        self.classes = output.shape[1]
        try:
            self._check(output.shape[1])
        except BadLabels:
            self.classes = None  # so that a repeated step raises it again
            raise

    def _check(self, classes: int) -> None:
        if self.low < 0 or self.high >= classes:
            raise out_of_range(self.low, self.high, classes)


def _may_be_classes(labels: torch.Tensor) -> bool:
    """Whether floating-point targets may be class numbers, or probabilities of classes."""
    if labels.dim() == 1:
        return bool((labels == labels.round()).all())
    sums = labels.sum(1, dtype=torch.float32) if labels.dim() > 1 else labels
    return bool((labels >= 0).all() and ((sums - 1).abs() < _CLOSE).all())
