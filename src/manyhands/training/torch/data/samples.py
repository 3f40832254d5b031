"""Reads a few samples before a job begins. None is consumed, and random numbers stay as they are."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from manyhands.training.torch.data.batches import Batch, map_tensors
from manyhands.training.torch.data.sources import Arrays, Samples, Source, Stream
from manyhands.training.torch.job import Job
from manyhands.training.torch.state import randomness


def can_be_read(data: Source) -> bool:
    """Whether the first samples can be read without consuming them: not from an iterator."""
    return not (isinstance(data, Stream) and isinstance(data.loader, Iterator))


def few_samples(data: Source, count: int) -> Batch:
    """The first samples, or for a stream its first batch."""
    if isinstance(data, Stream):
        return next(_rereadable(data).batches(0))
    assert data.count is not None
    return take(data, np.arange(min(count, data.count)))


def take(data: Arrays | Samples, numbers: np.ndarray[Any, np.dtype[np.int64]], seed: int | None = None) -> Batch:
    """The samples of these numbers; ``seed``: for what the collate function draws."""
    if isinstance(data, Arrays):
        return data.take(torch.from_numpy(numbers).to(data.tensors[0].device))
    plain = dataclasses.replace(data, workers=0, look=None)
    if data.collate is not None and seed is not None:
        plain.collate = functools.partial(_collated, data.collate, seed)
    (batch,) = plain.batches([numbers], seed=0, draws=0)
    return batch


def _collated(collate: Callable[[list[Any]], Any], seed: int, samples: list[Any]) -> Any:
    randomness.seed_all(seed)
    return collate(samples)


def first_batches(job: Job) -> Iterator[Batch]:
    """The first batches of a job's stream; of an iterator only the first batch, which is put back."""
    stream = job.train
    assert isinstance(stream, Stream)
    if can_be_read(stream):
        yield from _rereadable(stream).batches(0)
        return
    for batch in stream.loader:
        job.train = dataclasses.replace(stream, loader=itertools.chain([batch], stream.loader))
        yield batch
        return


def _rereadable(stream: Stream) -> Stream:
    return dataclasses.replace(stream, loader=_plain(stream.loader), look=None)


def _plain(loader: Any) -> Any:
    """A copy of the loader without worker processes; the state of its sampler does not change."""
    if not isinstance(loader, DataLoader):
        return loader
    try:
        plain = copy.deepcopy(loader, {id(loader.dataset): loader.dataset})
    except Exception:  # it holds something that cannot be copied
        return loader
    plain.num_workers = plain.timeout = 0
    return plain


def as_the_model(model: torch.nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device, with floating-point numbers in the model's dtype."""
    first = next(model.parameters())
    return map_tensors(lambda leaf: leaf.to(first.device, first.dtype if leaf.is_floating_point() else None), batch)
