"""How far an epoch is, in numbers on the device: a captured step reads and moves them on without the host."""

from __future__ import annotations

import torch


class Progress:
    """The epoch's order of samples, the place in it that the next batch begins at, and the number of its step."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.order = torch.zeros(count, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self, order: torch.Tensor, sample: int, step: int) -> None:
        """Take the order of an epoch, and where in it to begin."""
        self.order.copy_(order.pin_memory(), non_blocking=True)
        self.position.fill_(sample)
        self.step.fill_(step)

    def advance(self, samples: int) -> None:
        self.position += samples
        self.step += 1
