"""A model that is slow on one device: it simulates a slow device if all devices are equal."""

from __future__ import annotations

import torch
from torch import nn


class SlowOnRank(nn.Module):
    """Runs ``net``; on one rank, it first runs ``extra_passes`` forward passes and discards their results."""

    def __init__(self, net: nn.Module, rank: int, extra_passes: int) -> None:
        super().__init__()
        self.net, self.rank, self.extra_passes = net, rank, extra_passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == self.rank:
            with torch.no_grad():
                for _ in range(self.extra_passes):
                    self.net(x)
        result: torch.Tensor = self.net(x)
        return result
