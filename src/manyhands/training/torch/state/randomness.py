"""The random numbers of a process: PyTorch's, NumPy's and Python's, seeded, saved and restored together.

Datasets that draw random numbers (augmentation) get the same ones for a sample, wherever and whenever it is read.
PyTorch seeds each worker process of a loader once, so the random numbers of a sample depend on the worker that reads it
and on all that this worker has read before. A job that is resumed within an epoch would draw other numbers, and so
would one with another number of workers or devices. :class:`DrawnSamples` seeds PyTorch, NumPy and Python for every
sample, from (seed, epoch, number of the sample). For example with two workers, where "n:e" are the draws of sample n in
epoch e::

    from the start     worker 0: 7:0 1:0, 3:0 4:0     worker 1: 5:0 2:0
    resumed at batch 2 worker 0: 5:0 2:0              worker 1: 3:0 4:0

Generators that a dataset holds itself are not seeded.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from manyhands.training.data.loader_batches import OwnRandomStream as HostStream
from manyhands.training.data.loader_batches import preserve_host_random_state

# Held by whoever replaces the process's random numbers for a time, and by whoever watches who draws from them.
untouched = threading.RLock()


class OwnStream:
    """Within it, PyTorch, NumPy and Python draw from a separate stream, which the next ``with`` continues.

    A loader that shuffles by itself draws from the process's random numbers. Those differ from rank to rank, for
    dropout; the loader's order must not.
    """

    def __init__(self, seed: int, generator: Any = None) -> None:
        self._others = HostStream(seed)
        self._within = torch.Generator().manual_seed(seed).get_state()
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)

    def __enter__(self) -> None:
        untouched.acquire()
        self._others.__enter__()
        self._without = torch.get_rng_state()
        torch.set_rng_state(self._within)

    def __exit__(self, *_: object) -> None:
        self._within = torch.get_rng_state()
        torch.set_rng_state(self._without)
        self._others.__exit__()
        untouched.release()


def mixed_seed(*parts: int) -> int:
    """One seed of several numbers, well mixed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def seed_all(seed: int) -> None:
    """Seed all generators of this process, those of its GPUs too."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def preserve(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Afterwards the random numbers go on as if nothing had been drawn within; ``seed``: for those within."""
    gpus = [device] if device.type == "cuda" else []
    with preserve_host_random_state(), torch.random.fork_rng(gpus):
        if seed is not None:
            seed_all(seed)
        yield


def as_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of every generator, as tensors by name: nothing has to be pickled."""
    _, words, spare = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_spare": torch.tensor(math.nan if spare is None else spare, dtype=torch.float64),
    }
    array: Any = np.random.get_state()
    if isinstance(array, tuple) and array[0] == "MT19937":  # a caller may have put in another one
        states["numpy"] = torch.tensor([*map(int, array[1]), array[2], array[3]])
        states["numpy_spare"] = torch.tensor(array[4], dtype=torch.float64)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore what :func:`as_tensors` returned."""
    torch.set_rng_state(saved["torch"])
    spare = float(saved["python_spare"])
    random.setstate((3, tuple(saved["python"].tolist()), None if math.isnan(spare) else spare))
    if "numpy" in saved:
        *words, position, has_spare = saved["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(words, np.uint32), position, has_spare, float(saved["numpy_spare"])))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


# Of samples

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
    mixed = _mix(seed, number)
    torch.default_generator.manual_seed(mixed)  # not torch.manual_seed: that would reset those of the GPUs
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset has a way of its own to read several samples; a Subset has one only if its dataset has."""
    if type(dataset) is Subset:
        return _reads_at_once(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _mix(seed: int, number: int) -> int:
    """One seed of two, well mixed (splitmix64): NumPy's SeedSequence would take longer than many a sample."""
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) >> 1
