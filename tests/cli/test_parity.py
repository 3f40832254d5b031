"""What parity takes for equal: a training that is described by a function, without a framework."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manyhands.book.recipes import Way, nudged
from manyhands.cli import parity
from manyhands.cli.parity import Trial

FP32 = [Trial("fp32", 5, 1e-5)]
Weights = dict[str, np.ndarray]


def trained(kink: float, wrong: float = 1.0) -> Callable[[Way], Weights]:
    """A net whose kink lies at a weight: the last bit decides whether a gradient is there.

    ``kink`` is its share of the weight; ``wrong`` a factor by which several devices get the weight wrong.
    """

    def train(way: Way) -> Weights:
        if way.precision == "fp64":
            return {"w": np.full(4, 3.0)}
        first = nudged(np.full(4, 1.0, np.float32), way.nudge)
        flipped = way.devices > 1 or float(first[0]) > 1
        factor = (1 + kink if flipped else 1) * (wrong if way.devices > 1 else 1)
        return {"w": (first * 3 * factor).astype(np.float32)}

    return train


def test_a_kink_is_not_held_against_several_devices() -> None:
    for one in parity.compare(trained(kink=0.04), 1000, 2, trials=FP32):
        assert one.difference == pytest.approx(0.04, rel=1e-3)
        assert one.equal
        assert (one.error, one.error_alone) == (pytest.approx(0.04, rel=1e-3), pytest.approx(0.04, rel=1e-3))


def test_what_rounding_does_not_do_to_one_device_is_not_equal() -> None:
    for one in parity.compare(trained(kink=0.0, wrong=1.01), 1000, 2, trials=FP32):
        assert not one.equal
        assert one.error == pytest.approx(0.01, rel=1e-3)
        assert one.error_alone < 1e-6


@pytest.mark.parametrize("lost", [np.nan, np.inf, 9.0], ids=str)
def test_one_device_that_has_lost_its_way_excuses_nothing(lost: float) -> None:
    """In float32 one device ends in no numbers, or far off; the others in zeros."""

    def train(way: Way) -> Weights:
        if way.precision == "fp64":
            return {"w": np.full(4, 3.0)}
        return {"w": np.full(4, lost if way.devices == 1 else 0.0, np.float32)}

    assert [one.equal for one in parity.compare(train, 1000, 2, trials=FP32)] == [False, False]


def test_what_is_beyond_the_limit_is_not_called_equal() -> None:
    kink, wrong = (parity.compare(train, 1000, 2, trials=FP32)[0] for train in (trained(0.04), trained(0.0, 1.01)))
    assert kink.words == "beyond the limit, as near to float64 as one device (4.0e-02, one device up to 4.0e-02)"
    assert wrong.words.startswith("NOT EQUAL (1.0e-02, one device up to ")
    assert parity.compare(trained(0.0), 1000, 2, trials=FP32)[0].words == "equal"


def test_float64_has_no_excuse() -> None:
    def train(way: Way) -> Weights:
        return {"w": np.full(4, 3.0 if way.devices == 1 else 3.0 + 1e-9)}

    assert [one.equal for one in parity.compare(train, 1000, 2, trials=[Trial("fp64", 5, 1e-12)])] == [False, False]


def test_a_nudge_moves_every_number_to_a_neighbour() -> None:
    values = np.linspace(-2, 2, 100, dtype=np.float32)
    moved = nudged(values, 0)
    assert moved.dtype == np.float32
    assert np.all((moved == np.nextafter(values, np.float32(9))) | (moved == np.nextafter(values, np.float32(-9))))
    assert np.any(moved > values)
    assert np.any(moved < values)
    assert not np.array_equal(moved, nudged(values, 1))
    assert nudged(values, None) is values
    assert np.array_equal(nudged(np.arange(3), 0), np.arange(3))
