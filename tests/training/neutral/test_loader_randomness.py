"""A loader's random numbers are its own: drawn again they are the same, and the program's go on undisturbed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from manyhands.training.data.loader_batches import OwnRandomStream, draw_within
from manyhands.training.data.order import Cursor, Window
from manyhands.training.data.sources import Stream


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


class Shuffles:
    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.permutation(8)
        return iter([(order[:4], order[:4]), (order[4:], order[4:])])


def test_a_stream_that_shuffles_is_gone_through_again_in_the_same_order() -> None:
    stream = Stream(Shuffles())
    whole = list(stream.windows(Cursor(), seed=3))
    second = Cursor().after(whole[0][0])
    assert _samples(stream.windows(second, seed=3)) == _samples(whole)[1:]
    assert _samples(stream.windows(Cursor(), seed=4)) != _samples(whole)


def _samples(windows: Iterable[tuple[Window, tuple[np.ndarray, ...]]]) -> list[list[int]]:
    return [X.tolist() for _, (X, _) in windows]
