"""``LossSum``: a mean loss whose divisor is not the number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LossSum:
    """A mean loss, given as a sum and as what the sum is divided by.

    Return it from a loss or a ``training_step`` whose mean is not over samples: over the tokens that are not padding,
    or over weighted labels. On several devices, or with ``accumulate``, a batch is processed in parts, and the mean of
    the parts' means is not the mean of the batch. With a ``LossSum`` the trainer adds up all sums and all counts first
    and divides once, so that N devices make the update that one device makes::

        def training_step(self, batch):
            scores = self(batch["tokens"])
            total = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
            return mh.LossSum(total, count=(batch["labels"] != -100).sum())

    ``total`` and ``count`` are scalar tensors of the framework (``count`` may be a plain number). The gradient of
    ``count`` is not taken.
    """

    total: Any
    count: Any
