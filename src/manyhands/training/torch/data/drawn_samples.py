"""Datasets that draw random numbers (augmentation): the same ones for a sample, wherever and whenever it is read.

PyTorch seeds each worker process of a loader once, so the random numbers of a sample depend on the worker that reads it
and on all that this worker has read before. A job that is resumed within an epoch would draw other numbers, and so
would one with another number of workers or devices. Here PyTorch, NumPy and Python are seeded for every sample, from
(seed, epoch, number of the sample). For example with two workers, where "n:e" are the draws of sample n in epoch e::

    from the start     worker 0: 7:0 1:0, 3:0 4:0     worker 1: 5:0 2:0
    resumed at batch 2 worker 0: 5:0 2:0              worker 1: 3:0 4:0

Generators that a dataset holds itself are not seeded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

_PLAIN = (list, tuple, TensorDataset)  # they give what they hold
_WORD = 2**64 - 1


def draws_nothing(dataset: Any, collate: Any) -> bool:
    """Whether neither a dataset nor its collate function runs code of the user's."""
    return type(dataset) in _PLAIN and collate in (None, default_collate)


class DrawnSamples(Dataset[Any]):
    """The same samples, each of which draws its own random numbers: a batch is asked for by (seed, numbers)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: tuple[int, list[int]]) -> Sequence[Any]:
        """All samples of a batch; PyTorch's loader calls this."""
        seed, numbers = batch
        _begin(seed, numbers[0])  # a collate function may draw, too
        if type(self.dataset) not in _PLAIN and _reads_at_once(self.dataset):
            samples: Sequence[Any] = self.dataset.__getitems__(numbers)
            return samples
        return [self._sample(seed, number) for number in numbers]

    def _sample(self, seed: int, number: int) -> Any:
        if type(self.dataset) not in _PLAIN:
            _begin(seed, number)
        return self.dataset[number]


def _begin(seed: int, number: int) -> None:
    mixed = _mixed(seed, number)
    torch.default_generator.manual_seed(mixed)  # not torch.manual_seed: that would reset those of the GPUs
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset has a way of its own to read several samples; a Subset has one only if its dataset has."""
    if type(dataset) is Subset:
        return _reads_at_once(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _mixed(seed: int, number: int) -> int:
    """One seed of two, well mixed (splitmix64): NumPy's SeedSequence would take longer than many a sample."""
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) >> 1


def start_worker(function: Callable[[int], None], number: int) -> None:
    """Start a worker process of a loader: the user's function sees the dataset that the user has."""
    information: Any = get_worker_info()
    object.__setattr__(information, "dataset", information.dataset.dataset)  # it refuses to be changed otherwise
    function(number)
