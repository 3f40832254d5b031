"""What parity takes for equal: a training that is described by a function, without a framework."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.cli import parity
from manyhands.cli.parity import Training

Weights = dict[str, np.ndarray]


def verdicts(in_float64: float, in_float32: float) -> list[str]:
    """Those of a net that several devices get wrong by so much, in float64 and in float32."""

    def train(how: Training) -> Weights:
        wrong = in_float64 if how.precision == "fp64" else in_float32
        return {"w": np.full(4, 3.0 * (1 + wrong * (how.devices > 1)))}

    return [str(one).split(maxsplit=6)[-1] for one in parity.compare(train, 1000, 2)]


@pytest.mark.parametrize(
    ("in_float64", "in_float32", "expected"),
    [
        (0.0, 1e-7, ["equal", "equal"]),
        (1e-9, 1e-7, ["NOT EQUAL", "equal"]),
        (0.0, 1e-3, ["equal", "rounding: equal in float64"]),
        (1e-9, 1e-3, ["NOT EQUAL", "NOT EQUAL"]),
        (0.0, 0.1, ["equal", "NOT EQUAL"]),
        (0.0, np.nan, ["equal", "NOT EQUAL"]),
    ],
)
def test_float64_decides_and_float32_may_round(in_float64: float, in_float32: float, expected: list[str]) -> None:
    of_64, of_32 = expected
    assert verdicts(in_float64, in_float32) == [of_64, of_64, of_32, of_32]


@pytest.mark.parametrize("count", [40, 48, 20, 5000])
def test_there_are_enough_steps_even_and_uneven_shares_and_a_short_last_batch(count: int) -> None:
    seen: list[Training] = []

    def train(how: Training) -> Weights:
        seen.append(how)
        return {"w": np.ones(1)}

    parity.compare(train, count, 3, batch_size=16)
    assert [(how.devices, how.shares) for how in seen] == [(1, None), (3, None), (3, [3.0, 2.0, 1.0])] * 2
    for how in seen:
        assert how.samples <= count
        assert how.samples % 16
        assert how.epochs * -(-how.samples // 16) >= (50 if how.precision == "fp64" else 5)
