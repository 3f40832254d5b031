"""``shares="measured"``: each rank's speed is measured once, before the first step, and shares follow it.

All ranks time the forward and backward pass of a copy of the model over their equal shard of the first batch. The job
stays as it is, and afterwards shares stay as they are. For example two devices that take 1 ms and 3 ms for a sample::

    speeds  1 and 1/3 samples a millisecond   ->   shares 0.75 and 0.25: both need the same time
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch

from manyhands.training.torch.data.batches import Shard
from manyhands.training.torch.objective import Objective
from manyhands.training.torch.ranks import global_batch_norm
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.number_format import NumberFormat

_PASSES = 3
_LEAST = 0.01  # of a batch


def measured(
    model: torch.nn.Module, objective: Objective, shard: Shard | None, number_format: NumberFormat, world: World
) -> tuple[list[float], str]:
    """The shares of all ranks, and a note about them; all ranks take part."""
    seconds = 0.0
    if shard is not None and shard.size:
        with randomness.preserved(world.device):
            passes = [_timed_pass(model, objective, shard, number_format, world.device) for _ in range(_PASSES + 1)]
        seconds = min(passes[1:]) / shard.size
    per_sample = [float(each) for each in world.gather(torch.tensor([seconds], dtype=torch.float64))]
    shares = shares_from(per_sample)
    speeds = [1 / each for each in per_sample if each > 0]
    gain = sum(speeds) / max(speeds) if speeds else 1.0
    shown = ", ".join(f"{share:.2f}" for share in shares)
    return shares, f"shares measured: [{shown}]; all together could be {gain:.2f}x the fastest alone"


def shares_from(seconds_per_sample: Sequence[float]) -> list[float]:
    """Shares in which all are ready at the same time. A rank that had no samples (0.0) counts as an average one."""
    speeds = [1 / seconds for seconds in seconds_per_sample if seconds > 0] or [1.0]
    rates = [1 / seconds if seconds > 0 else sum(speeds) / len(speeds) for seconds in seconds_per_sample]
    shares = [max(rate / sum(rates), _LEAST) for rate in rates]
    return [share / sum(shares) for share in shares]


def _timed_pass(
    model: torch.nn.Module, objective: Objective, shard: Shard, number_format: NumberFormat, device: torch.device
) -> float:
    trial = copy.deepcopy(model)
    global_batch_norm.use_local_statistics(trial)  # the other ranks are not asked
    _wait_for(device)
    began = time.perf_counter()
    for part, size in zip(shard.parts, shard.sizes, strict=True):
        if size:
            with number_format.scope(device):
                loss, _ = objective(trial, number_format.cast(part))
            loss.backward()
    _wait_for(device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
