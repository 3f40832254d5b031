"""What parity compares, and what it takes for equal; the contract suite trains."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.cli.parity import LIMIT, extent, largest_difference


@pytest.mark.parametrize(("wrong", "equal"), [(0.0, True), (1e-13, True), (1e-9, False), (np.nan, False)])
def test_a_difference_beyond_the_limit_is_never_called_equal(wrong: float, equal: bool) -> None:
    three = np.full(4, 3.0)
    assert (largest_difference({"w": three * (1 + wrong)}, {"w": three}) <= LIMIT) is equal


@pytest.mark.parametrize("count", [40, 48, 20, 5000])
def test_there_are_enough_steps_and_a_short_last_batch(count: int) -> None:
    samples, epochs = extent(count, 16, 50)
    assert samples <= count
    assert samples % 16
    assert epochs * -(-samples // 16) >= 50
