"""Does training on N devices give what one device gives? Trained and compared, with numbers.

In float64 after 50 steps the two agree to about 1e-15; in float32 only the first steps can be compared, because small
differences of rounding grow without bound. A short last batch and uneven shards are always among the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.training.torch.sources import Arrays
from manyhands.training.torch.trainer import Trainer


@dataclass(frozen=True)
class Comparison:
    """One training on several devices held against the one on one device."""

    precision: str
    steps: int
    devices: int
    shares: Sequence[float] | None
    difference: float
    limit: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.limit


@dataclass(frozen=True)
class Trial:
    precision: Any
    dtype: torch.dtype
    steps: int
    limit: float


TRIALS = (Trial("fp64", torch.float64, 50, 1e-12), Trial("fp32", torch.float32, 5, 1e-5))


def compare(
    model: torch.nn.Module,
    data: Arrays,
    devices: int,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    batch_size: int = 32,
    batch_stats: Any = "global",
    trials: Sequence[Trial] = TRIALS,
) -> list[Comparison]:
    """Train copies of the model on 1 and on N processes, evenly and unevenly, and compare all they hold."""
    uneven = [float(devices - rank) for rank in range(devices)]
    found = []
    for trial in trials:
        count, epochs = _extent(data.count, batch_size, trial.steps)
        part = Arrays(tuple(t[:count] for t in data.tensors), data.prepare, batch_size)

        def trained(
            ranks: int, shares: Sequence[float] | None, trial: Trial = trial, part: Arrays = part, epochs: int = epochs
        ) -> Any:
            net = copy.deepcopy(model).to(trial.dtype)
            settings: dict[str, Any] = {"batch_stats": batch_stats, "precision": trial.precision, "shares": shares}
            optimizer = _Momentum()
            Trainer(
                epochs, devices=["cpu"], ranks_per_device=ranks, loss=loss, optimizer=optimizer, quiet=True, **settings
            ).fit(net, part)
            return net.state_dict()

        alone = trained(1, None)
        for shares in (None, uneven):
            difference = largest_difference(trained(devices, shares), alone)
            steps = epochs * -(-count // batch_size)
            found.append(Comparison(trial.precision, steps, devices, shares, difference, trial.limit))
    return found


def _extent(count: int, batch_size: int, steps: int) -> tuple[int, int]:
    """How many samples, and how many epochs of them: at least so many steps, and the last of an epoch is short."""
    short = max(1, batch_size // 3)
    count = min(count, batch_size * steps - short)
    if count % batch_size == 0 and count > short:
        count -= short
    return count, -(-steps // -(-count // batch_size))


class _Momentum:
    """An optimizer with a memory, so that differences of early steps would show."""

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of two sets of tensors, tensor by tensor.

    Relative to the tensor's norm; to a thousandth per element where that is smaller (biases that are zero up to
    noise have no relative difference).
    """
    worst = 0.0
    for name, right in other.items():
        if right.is_floating_point():
            a, b = one[name].double(), right.double()
            floor = 1e-3 * b.numel() ** 0.5
            worst = max(worst, float((a - b).norm()) / max(float(b.norm()), floor))
        elif not torch.equal(one[name], right):
            worst = float("inf")
    return worst
