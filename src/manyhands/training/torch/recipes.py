"""How ``manyhands train`` trains: the optimizer, its schedule, and how long."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import torch

from manyhands.training.torch.models import MODELS


def one_cycle(done: float) -> float:
    """Up in a line to 1 during the first fifth, then down to nothing along a cosine."""
    return done / 0.2 + 0.04 if done < 0.19 else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - 0.19) / 0.81))


class Nesterov:
    """SGD with Nesterov's momentum and weight decay."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


def seconds_per_epoch(net: torch.nn.Module, batch_size: int, samples: int) -> float:
    """About how long an epoch takes on this machine's CPU, by the time of three steps."""
    net = copy.deepcopy(net)
    images, labels = torch.rand(batch_size, 1, 28, 28), torch.zeros(batch_size, dtype=torch.int64)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * samples / batch_size


def for_a_minute(batch_size: int, samples: int) -> tuple[str, int]:
    """A model and a number of epochs (at most four) that a CPU is ready with in about a minute."""
    for name in ("lenet", "mlp"):
        seconds = seconds_per_epoch(MODELS[name](num_classes=10), batch_size, samples)
        if seconds < 75:
            break
    return name, max(1, min(4, round(60 / seconds)))
