"""A loader's random numbers are its own: drawn again they are the same, and the program's go on undisturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from manyhands.training.data.loader_batches import OwnRandomStream, draw_within


def draws() -> Iterator[float]:
    for _ in range(3):
        yield np.random.rand() + random.random()


def test_the_programs_numbers_go_on() -> None:
    np.random.seed(1)
    random.seed(1)
    expected = [np.random.rand(), random.random(), np.random.rand()]
    np.random.seed(1)
    random.seed(1)
    within = draw_within(OwnRandomStream(5), draws())
    found = []
    for draw in (np.random.rand, random.random, np.random.rand):
        next(within)
        found.append(draw())
    assert found == expected


def test_an_error_leaves_the_programs_numbers_alone() -> None:
    def fails() -> Iterator[float]:
        np.random.rand()
        raise KeyError
        yield

    np.random.seed(1)
    with pytest.raises(KeyError):
        list(draw_within(OwnRandomStream(5), fails()))
    assert np.random.rand() == np.random.RandomState(1).rand()
