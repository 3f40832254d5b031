"""The random numbers of a process: PyTorch's, NumPy's and Python's, seeded, saved and restored together."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from manyhands.training.data.loader_batches import OwnStream as HostStream

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
def preserved(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Afterwards the random numbers go on as if nothing had been drawn within; ``seed``: for those within."""
    python, array, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if seed is not None:
        seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)


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
