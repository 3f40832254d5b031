"""Datasets that draw random numbers: the same for a sample on any number of workers and devices, and when resumed."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import as_if_killed
from torch.utils.data import DataLoader, Subset, get_worker_info
from training_cases import Rows, difference, fit, mlp, same

from manyhands.training.options import Checkpoints
from manyhands.training.torch.data.feed import ahead
from manyhands.training.torch.data.sources import Samples, source
from manyhands.training.torch.state.randomness import DrawnSamples


class Augmented(Rows):
    """Adds noise from all three generators, as often as a coin says."""

    shift = 0.0

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        X, y = super().__getitem__(number)
        for _ in range(random.randrange(3)):
            X = X + np.random.normal() * torch.randn(6, dtype=X.dtype)
        return X + self.shift, y


def start(_: int) -> None:
    """What people write to give each worker its part: they set something on the worker's dataset."""
    information: Any = get_worker_info()
    assert type(information.dataset) is Augmented
    information.dataset.shift = 0.5


def train(ranks: int = 1, workers: int = 2, persistent: bool = False, **options: Any) -> Any:
    dataset = Augmented(40)
    dataset.shift = 0.0 if workers else 0.5
    loader = DataLoader(
        dataset,
        8,
        shuffle=True,
        num_workers=workers,
        worker_init_fn=start if workers else None,
        persistent_workers=persistent,
    )
    return fit(mlp(dropout=options.pop("dropout", 0.0)), loader, ranks, max_epochs=2, **options)


def test_resumed_within_an_epoch_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoints": Checkpoints(every=1, keep=20), "dropout": 0.5}
    whole, _ = train(run=tmp_path / "whole", **options)
    for step in (2, 8):
        killed = as_if_killed(tmp_path / "whole", step)
        assert same(whole, train(run=killed, resume="auto", **options)[0])


def test_workers_that_the_reading_thread_forks_end_well() -> None:
    """An exit code of 1 would end the job once PyTorch listens, after a loader was iterated in the main thread."""

    def exit_codes() -> Iterator[int | None]:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        yield process.exitcode

    assert list(ahead(exit_codes())) == [0]


def test_the_same_samples_on_any_number_of_workers_and_devices() -> None:
    alone, _ = train(workers=0)
    assert same(alone, train(workers=2)[0])
    assert same(alone, train(workers=2, persistent=True)[0])
    assert difference(alone, train(ranks=2, workers=0)[0]) < 1e-12


def test_every_epoch_draws_anew() -> None:
    dataset = Augmented(4)
    one, again, other = (DrawnSamples(dataset).__getitems__((seed, [2, 3])) for seed in (5, 5, 6))
    assert torch.equal(one[1][0], again[1][0])
    assert not torch.equal(one[1][0], other[1][0])
    subset = DrawnSamples(Subset(dataset, [3, 2]))
    assert torch.equal(subset.__getitems__((5, [0, 1]))[1][0], subset.__getitems__((5, [1]))[0][0])


class Processes(Rows):
    """Each sample is the process that reads it."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([os.getpid()]), torch.tensor(number)


@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_read_every_epoch(persistent: bool) -> None:
    samples = source(DataLoader(Processes(8), 4, num_workers=2, persistent_workers=persistent))
    assert isinstance(samples, Samples)
    readers = []
    for order in (np.arange(8), np.arange(8)[::-1]):
        batches = list(samples.batches(np.split(order, 2), seed=0, draws=0))
        assert torch.cat([numbers for _, numbers in batches]).tolist() == order.tolist()
        readers.append({int(process) for processes, _ in batches for process in processes})
    assert (readers[0] == readers[1]) is persistent
    begun = samples.batches(np.split(np.arange(8), 2), seed=0, draws=0)
    next(begun)  # an epoch that a limit ends: the next one starts anew
    assert next(samples.batches([np.arange(4, 8)], seed=0, draws=0))[1].tolist() == [4, 5, 6, 7]


def test_batches_of_workers_take_no_file_descriptors() -> None:
    samples = source(DataLoader(Rows(), 4, num_workers=1))
    assert isinstance(samples, Samples)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100 + len(os.listdir("/proc/self/fd")), hard))
    try:
        assert len(list(samples.batches([np.arange(4)] * 200, seed=0, draws=0))) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
