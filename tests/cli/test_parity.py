"""What parity takes for equal: a training that is described by a function, without a framework."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.cli import parity
from manyhands.cli.parity import Training

Weights = dict[str, np.ndarray]


@pytest.mark.parametrize(("wrong", "verdict"), [(0.0, "equal"), (1e-13, "equal"), (1e-9, "NOT"), (np.nan, "NOT")])
def test_a_difference_beyond_the_limit_is_never_called_equal(wrong: float, verdict: str) -> None:
    def train(how: Training) -> Weights:
        return {"w": np.full(4, 3.0 * (1 + wrong * (how.devices > 1)))}

    assert [str(one).split()[5] for one in parity.compare(train, 1000, 2)] == [verdict] * 2


@pytest.mark.parametrize("count", [40, 48, 20, 5000])
def test_there_are_enough_steps_even_and_uneven_shares_and_a_short_last_batch(count: int) -> None:
    seen: list[Training] = []

    def train(how: Training) -> Weights:
        seen.append(how)
        return {"w": np.ones(1)}

    parity.compare(train, count, 3, batch_size=16)
    assert [(how.devices, how.shares) for how in seen] == [(1, None), (3, None), (3, [3.0, 2.0, 1.0])]
    for how in seen:
        assert how.samples <= count
        assert how.samples % 16
        assert how.epochs * -(-how.samples // 16) >= 50
