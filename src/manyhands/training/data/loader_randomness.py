"""Random numbers that a loader draws on the host: seeded separately, so that they can be repeated.

A loader that shuffles by itself draws from the random numbers of the whole program. Here NumPy's and Python's are
seeded while it works, and put back after each batch: an epoch that is iterated again has the same
order, and the program's own numbers go on as if nothing had been drawn.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


def with_seeded_randomness(values: Iterable[Any], seed: int) -> Iterator[Any]:
    """The same values, drawn with random numbers that begin at the seed."""
    within = (np.random.RandomState(seed % 2**32).get_state(), random.Random(seed).getstate())
    end = object()
    values_left: Iterator[Any] | None = None
    while True:
        without = (np.random.get_state(), random.getstate())
        _set(within)
        try:
            values_left = iter(values) if values_left is None else values_left
            value = next(values_left, end)
            within = (np.random.get_state(), random.getstate())
        finally:
            _set(without)
        if value is end:
            return
        yield value


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Afterwards NumPy's and Python's random numbers go on as if nothing had been drawn within."""
    before = (np.random.get_state(), random.getstate())
    try:
        yield
    finally:
        _set(before)


def _set(state: tuple[Any, Any]) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])
