"""Random numbers that a loader draws for itself, the same on every rank and apart from those of the model."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class Own:
    """Within it, PyTorch, NumPy and Python draw from a stream of their own, which the next ``with`` goes on with.

    A loader that shuffles by itself draws from the process's random numbers. Those differ from rank to rank, for
    dropout; the loader's order must not.
    """

    def __init__(self, seed: int, generator: Any = None) -> None:
        self._within = _seeded(seed)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)

    def __enter__(self) -> None:
        self._without = _state()
        _set_state(self._within)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._within = _state()
        _set_state(self._without)


def _seeded(seed: int) -> tuple[Any, ...]:
    array = np.random.RandomState(seed % 2**32).get_state()
    return torch.Generator().manual_seed(seed).get_state(), array, random.Random(seed).getstate()


def _state() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
