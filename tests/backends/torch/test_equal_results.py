"""What counts as equal results, and how far others are apart."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.backends.torch import planning

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "plain", "same", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], True, 0.0),
        ([3.0, 4.4], [3.0, 4.0], False, 0.08),
        ([1.0, NAN], [1.0, NAN], True, 0.0),
        ([3.4, NAN, 3.0], [4.0, NAN, 3.0], False, 0.12),
        ([1.0, NAN], [NAN, 1.0], False, INF),
        ([1.0, NAN], [1.0, 2.0], False, INF),
        ([1.0, INF], [1.0, INF], True, 0.0),
        ([1.0, INF], [1.0, 2.0], False, INF),
        ([1.0, 2.0], [1.0, INF], False, INF),
    ],
)
def test_equal(ours: list[float], plain: list[float], same: bool, difference: float) -> None:
    result = planning.equal([torch.tensor(ours)], [torch.tensor(plain)])
    assert result == (same, pytest.approx(difference))
