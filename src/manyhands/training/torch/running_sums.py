"""Loss and accuracy of an epoch, summed on the device and read late.

Adding to them makes no host wait. :meth:`Metrics.peek` starts a copy to the host and gives the newest one that has
arrived; :meth:`Metrics.read` waits, and is for the end of an epoch.
"""

from __future__ import annotations

import math

import torch

from manyhands.backends.protocol import Arrival
from manyhands.backends.torch import devices as backend
from manyhands.training.running_sums import Figures

_LOSS, _RIGHT, _COUNT, _BAD_STEP = range(4)


class Metrics:
    """Four numbers on the device: sum of losses, right answers, samples, first bad step (or infinity)."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.counts_right = False
        self._arrival: Arrival[torch.Tensor] | None = None
        self._shown: Figures | None = None
        self.reset()

    def reset(self) -> None:
        self.sums.zero_()
        self.sums[_BAD_STEP:].fill_(math.inf)
        self._arrival, self._shown = None, None

    def add(
        self, loss: torch.Tensor, right: torch.Tensor | None, count: int, step: torch.Tensor | int, weight: float = 1.0
    ) -> None:
        """Add a batch: the mean loss over its samples, and the right answers among them."""
        loss = loss.detach().double()
        self.sums[_LOSS] += loss * (count * weight)
        if right is not None:
            self.counts_right = True
            self.sums[_RIGHT] += right
        self.sums[_COUNT] += count
        self.mark(loss, step)

    def mark(self, loss: torch.Tensor, step: torch.Tensor | int) -> None:
        """Remember the step if it is the first whose loss is NaN."""
        now = step.double() if isinstance(step, torch.Tensor) else self.sums.new_full((), step)
        bad = torch.where(torch.isfinite(loss), self.sums.new_full((), math.inf), now)
        torch.minimum(self.sums[_BAD_STEP], bad, out=self.sums[_BAD_STEP])

    def peek(self) -> Figures | None:
        """The newest figures that are on the host already; never waits."""
        if self._arrival is not None and self._arrival.ready():
            self._shown = self._figures(self._arrival.result())
            self._arrival = None
        if self._arrival is None:
            self._arrival = backend.start_move(self.sums.clone(), torch.device("cpu"))
        return self._shown

    def read(self) -> Figures:
        return self._figures(self.sums.cpu())

    def restore(self, loss_sum: float, right: float, count: float, *, counted: bool) -> None:
        """Go on from the sums of a checkpoint."""
        self.sums[:_BAD_STEP] = torch.tensor([loss_sum, right, count], dtype=torch.float64)
        self.counts_right = counted

    def _figures(self, sums: torch.Tensor) -> Figures:
        loss, right, count, bad = sums.tolist()
        return Figures(loss, right, count, None if math.isinf(bad) else int(bad), self.counts_right)


def as_tensor(own: Figures) -> torch.Tensor:
    bad = math.inf if own.bad_step is None else own.bad_step
    return torch.tensor([own.loss_sum, own.right, own.count, bad, own.counted], dtype=torch.float64)


def from_tensor(values: torch.Tensor) -> Figures:
    loss, right, count, bad, counted = values.tolist()
    return Figures(loss, right, count, None if math.isinf(bad) else int(bad), bool(counted))
