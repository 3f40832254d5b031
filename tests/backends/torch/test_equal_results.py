"""What counts as equal results, and how far others are apart."""

from __future__ import annotations

import math
from typing import Any

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
        ([1 + 1j], [1 + 2j], False, 1 / math.sqrt(5)),
    ],
)
def test_equal(ours: list[float], plain: list[float], same: bool, difference: float) -> None:
    result = planning.equal([torch.tensor(ours)], [torch.tensor(plain)])
    assert result == (same, pytest.approx(difference))


def test_plain_values_that_differ_are_no_small_difference() -> None:
    one, far = torch.ones(2), (False, INF)
    assert planning.equal([one, 1, "a", None, NAN], [one, 1, "a", None, NAN]) == (True, 0.0)
    pairs: list[tuple[Any, Any]] = [(1, 2), (1, 1.0), (True, 1), ("a", "b"), (None, 0), (0.1, 0.1 + 1e-12)]
    for ours, plain in [*pairs, (one, 1), (None, one)]:
        assert planning.equal([one, ours], [one, plain]) == far
    assert planning.equal([one.double()], [one]) == far


def test_results_that_share_memory_are_found() -> None:
    one, other = torch.full((3,), 2.0), torch.full((3,), 2.0)
    assert planning.shared_memory([one, one]) == {(0, 1)}
    assert planning.shared_memory([one, other]) == set()
    assert planning.shared_memory(torch.full((6,), 2.0).split(3)) == {(0, 1)}
