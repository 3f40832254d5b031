"""The position in an epoch, in tensors on the device: a captured step reads and advances them without the host."""

from __future__ import annotations

import torch


class Position:
    """The epoch's order of samples, the place in it where the next batch begins, and the number of the step."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.order = torch.zeros(count, dtype=torch.int64, device=device)
        self.sample = torch.zeros((), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, order: torch.Tensor, sample: int, step: int) -> None:
        """Begin an epoch with this order of samples, at this sample and step."""
        self.order.copy_(order.pin_memory(), non_blocking=True)
        self.sample.fill_(sample)
        self.step.fill_(step)

    def advance(self, samples: int) -> None:
        self.sample += samples
        self.step += 1
