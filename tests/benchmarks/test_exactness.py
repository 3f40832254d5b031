"""The rule by which results that round at other places are as exact as plain execution's, or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from exact.exactness import CannotBeExact, Distance, judge


def test_noise_is_measured_against_noise() -> None:
    weights = Distance(0.1, 0.1, 1.0, 1e-5)
    noise = [Distance(0.0, 1e-6, 1e-15, 1e-5), Distance(3e-6, 2e-6, 1e-15, 1e-5), Distance(2e-6, 0.0, 0.0, 1e-5)]
    assert judge([weights, *noise], 0.005).accepted
    assert not judge([weights, *noise, Distance(1e-3, 1e-6, 1e-15, 1e-5)], 0.005).accepted


def test_luck_is_no_more_than_plain_executions_least_exact_result_has_and_has_a_limit() -> None:
    first, lucky = Distance(0.003, 0.003, 1.0, 1e-5), Distance(0.002, 1e-7, 1.0, 1e-5)
    assert judge([first, lucky], 0.005).accepted
    assert not judge([lucky], 0.005).accepted
    assert judge([lucky], 0.005, jump=0.0025).accepted
    assert not judge([first, Distance(0.01, 1e-7, 1.0, 1e-5)], 0.005).accepted
    assert not judge([Distance(0.4, 0.4, 1.0, 1e-5), Distance(0.01, 1e-7, 1.0, 1e-5)], 0.005).accepted


def test_nothing_is_never_as_exact() -> None:
    for plain in (0.0, 0.3, 0.5, 0.9, 0.99):
        assert not judge([Distance(1.0, plain, 1.0, 1e-2)], 0.05).accepted


def test_a_function_that_is_chaos_has_no_measure() -> None:
    with pytest.raises(CannotBeExact, match="nothing in common"):
        judge([Distance(1.0, 1.5, 1.0, 1e-5)], 0.05)


def test_of_a_change_the_rounding_of_what_is_changed_excuses_nobody_else() -> None:
    change = Distance(0.004, 0.004, 1.0, 0.01, whole=1000.0)
    assert judge([change, Distance(1e-4, 1e-6, 1.0, 1e-5)], 0.005).accepted is False
    assert judge([Distance(0.004, 0.004, 1.0, 0.0), Distance(1e-4, 1e-6, 1.0, 1e-5)], 0.005).accepted
