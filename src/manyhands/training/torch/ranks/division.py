"""How the batches of a job are divided over its ranks, and this rank's shard of each.

``shares="measured"``: each rank's speed is measured once, before the first step, and shares follow it. All ranks time
the forward and backward pass of a copy of the model over their equal shard of the first batch. The job stays as it is,
and afterwards shares stay as they are. For example two devices that take 1 ms and 3 ms for a sample::

    speeds  1 and 1/3 samples a millisecond   ->   shares 0.75 and 0.25: both need the same time
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from manyhands.training.data.order import Cursor, Window, epoch_order, windows
from manyhands.training.data.sources import bad_numbers
from manyhands.training.options import Settings
from manyhands.training.torch.data import feed
from manyhands.training.torch.data.batches import Shard, tensors_in
from manyhands.training.torch.data.feed import Division
from manyhands.training.torch.data.sources import Samples, Source, Stream
from manyhands.training.torch.job import NumberFormat
from manyhands.training.torch.objective import Objective
from manyhands.training.torch.ranks import global_batch_norm
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import randomness

_PASSES = 3
_LEAST = 0.01  # of a batch

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class RankFeed:
    """The batches of a job as one rank gets them: its shard of each, on its device."""

    def __init__(
        self, data: Source, settings: Settings, division: Division, measure: Callable[[Shard | None], list[float]]
    ) -> None:
        """``measure``: from this rank's shard of a batch to the shares of all ranks."""
        self.data, self.division = feed.resident(data, division.world.device), division
        self._settings, self._measure = settings, measure
        self._order: dict[int, _Numbers] = {}  # of the newest epoch

    @property
    def shares(self) -> list[float] | None:
        return self.division.shares

    @property
    def _is_to_measure(self) -> bool:
        """A resumed job on the same devices has its shares."""
        return self._settings.step.shares == "measured" and self.division.world.size > 1 and self.shares is None

    def order(self, epoch: int) -> _Numbers:
        """The numbers of all samples in the order of an epoch."""
        count = self.data.count
        assert count is not None
        if epoch not in self._order:
            self._order = {epoch: epoch_order(self._settings.seed, epoch, count, shuffle=self.data.shuffle)}
        return self._order[epoch]

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Shard | None]]:
        """The remaining batches of the epoch, with this rank's shard of each."""
        if isinstance(self.data, Stream):
            yield from self._of_stream(self.data, cursor)
            return
        left = self.windows(cursor)
        yield from zip(left, self._shards(left), strict=True)

    def windows(self, cursor: Cursor) -> list[Window]:
        """The remaining batches of the epoch; before the first step shares are measured, if they are to be."""
        assert self.data.count is not None
        left = list(windows(cursor, self.data.count, self._settings.batch_size))
        if self._is_to_measure and left:
            self.division.shares = self._measure(next(self._shards(left[:1])))
        return left

    def _shards(self, these: list[Window]) -> Iterator[Shard | None]:
        order = self.order(these[0].epoch) if these else np.zeros(0, np.int64)
        return feed.shards(self.data, order, these, self.division, seed=self._settings.seed)

    def _of_stream(self, stream: Stream, cursor: Cursor) -> Iterator[tuple[Window, Shard | None]]:
        seed = randomness.mixed_seed(self._settings.seed, cursor.epoch)
        batches: Iterator[tuple[Window, Any]] = feed.stream_windows(stream, cursor, seed=seed)
        first = next(batches, None) if self._is_to_measure else None
        if first is not None:
            self.division.shares = self._measure(next(feed.stream_shards([first], self.division))[1])
            batches = itertools.chain([first], batches)
        yield from feed.stream_shards(batches, self.division)

    def shard(self, window: Window) -> Shard | None:
        """This rank's samples of one batch."""
        return next(self._shards([window]))

    def bad_samples(self, numbers: _Numbers) -> str | None:
        """Which of these samples of a dataset have NaN or infinity, in words."""
        if not isinstance(self.data, Samples):
            return None
        parts = [part for part in tensors_in(self.data.pick(numbers)) if part.shape[:1] == numbers.shape]
        return bad_numbers(parts, numbers.tolist())


# Measured shares


def measure_shares(
    model: torch.nn.Module, objective: Objective, shard: Shard | None, number_format: NumberFormat, world: World
) -> tuple[list[float], str]:
    """The shares of all ranks, and a note about them; all ranks take part."""
    seconds = 0.0
    if shard is not None and shard.size:
        with randomness.preserve(world.device):
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
