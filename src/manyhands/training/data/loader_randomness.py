"""Random numbers that a loader draws on the host: seeded separately, so that they can be repeated.

A loader that shuffles by itself draws from the random numbers of the whole program. Here NumPy's and Python's are
seeded while it works, and put back after each batch: an epoch that is iterated again has the same order, and the
program's own numbers go on as if nothing had been drawn. PyTorch's are added in
:mod:`manyhands.training.torch.state.randomness`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np


class OwnStream:
    """Within it, NumPy and Python draw from a separate stream, which the next ``with`` continues."""

    def __init__(self, seed: int) -> None:
        self._within: tuple[Any, Any] = np.random.RandomState(seed % 2**32).get_state(), random.Random(seed).getstate()

    def __enter__(self) -> None:
        self._without = _state()
        _set(self._within)

    def __exit__(self, *_: object) -> None:
        self._within = _state()
        _set(self._without)


def drawn_within(stream: AbstractContextManager[None], values: Iterable[Any]) -> Iterator[Any]:
    """The same values; the random numbers that they take are drawn from the stream."""
    end = object()
    with stream:
        values_left = iter(values)
    while True:
        with stream:
            value = next(values_left, end)
        if value is end:
            return
        yield value


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Afterwards NumPy's and Python's random numbers go on as if nothing had been drawn within."""
    before = _state()
    try:
        yield
    finally:
        _set(before)


def _state() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _set(state: tuple[Any, Any]) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])
