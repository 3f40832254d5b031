"""What more devices would give, in thought: functions for the command that plans, runs and forecasts one of them.

    manyhands parallel benchmarks/forecast.py:ensemble --devices 2
    manyhands parallel benchmarks/forecast.py:ensemble --devices 16
    manyhands parallel benchmarks/forecast.py:stack --devices 16

The costs of the tasks are measured here; where they are done, and the copies between devices (25 GB/s, 10 us each), are
simulated. The 64 members of an ensemble need nothing of each other until their scores are averaged; in a stack, the
same products one after the other, each layer needs the one before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEMBERS, LAYERS, WIDTH = 64, 4, 256


def inputs() -> list[Tensor]:
    """A batch, and a weight for each member."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(MEMBERS)]
    return [torch.randn(256, WIDTH), *weights]


def ensemble(batch: Tensor, *weights: Tensor) -> Tensor:
    """Each member's scores of ten classes on its own, then their mean."""
    results = []
    for weight in weights:
        x = batch
        for _ in range(LAYERS):
            x = (x @ weight).relu()
        results.append(x @ weight[:, :10])
    return torch.stack(results).mean(0)


def stack(batch: Tensor, *weights: Tensor) -> Tensor:
    """The same layers, one after the other."""
    for weight in weights:
        for _ in range(LAYERS):
            batch = (batch @ weight).relu()
    return batch
