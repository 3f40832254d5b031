"""Durations and intervals in words, and the limits that are made of them."""

from __future__ import annotations

import datetime
import doctest
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.errors import BadSettings
from manyhands.training import stopping
from manyhands.training.data.loader_batches import as_number
from manyhands.training.options import Limits


def test_durations_and_intervals() -> None:
    assert doctest.testmod(stopping).failed == 0
    assert Limits(max_time="1h30m") == Limits(max_time=5400) == Limits(max_time=datetime.timedelta(hours=1.5))
    assert Limits(evaluate_every="2 epochs").evaluation == (2, "epochs")
    assert Limits(evaluate_every="10 steps").evaluation == (10, "steps")
    assert Limits().evaluation == (1, "epochs")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 0}, r"Limits\(max_steps=0\): give a whole number of at least 1"),
        ({"max_time": "2 fortnights"}, r"Limits\(max_time='2 fortnights'\): give '2h'"),
        ({"max_time": -1}, r"Limits\(max_time=-1\): give '2h'"),
        ({"evaluate_every": 500}, r"Limits\(evaluate_every=500\): say of what, '500 steps' or '2 epochs'"),
        ({"evaluate_every": "0 steps"}, "say of what"),
        ({"limit_batches": 1.5}, r"Limits\(limit_batches=1.5\): give a number of batches .*, as 0.1 \(1.0 is all\)"),
        ({"limit_val_batches": True}, "give a number of batches"),
        ({"limit_batches": 2, "overfit_batches": 2}, "limit_batches=2 takes other samples .* choose one"),
    ],
)
def test_limits_that_are_none(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        Limits(**options)


def test_parts_of_the_batches() -> None:
    hundred = SimpleNamespace(count=100, batch_size=None)
    found = [as_number(limit, hundred, 1, "limit") for limit in (None, 1.0, 1, 0.29, 0.999, 7)]
    assert found == [None, None, 1, 29, 99, 7]
    assert as_number(0.5, SimpleNamespace(count=None, loader=[0] * 5), 1, "limit") == 2
    with pytest.raises(BadSettings, match=r"limit=0.005 of 100 batches is none: .* at least 0.01"):
        as_number(0.005, hundred, 1, "limit")
    with pytest.raises(BadSettings, match="the loader does not say how many"):
        as_number(0.5, SimpleNamespace(count=None, loader=iter([])), 1, "limit")
