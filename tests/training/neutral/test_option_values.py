"""Options by topic: each object checks its values when it is made, and an error says what to write."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manyhands.errors import BadSettings, BadShares, UnknownOption
from manyhands.training.data.loader_batches import as_number
from manyhands.training.options import Checkpoints, Limits, Settings, Step, Workers


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Step, {"accumulate": 0}, r"Step\(accumulate=0\): give a whole number of at least 1"),
        (Step, {"batch_stats": "none"}, r"Step\(batch_stats='none'\): choose one of per_device, global"),
        (Step, {"on_nan": "ignore"}, r"Step\(on_nan='ignore'\): choose one of stop, continue"),
        (Step, {"optimize": False}, r"Step\(optimize=False\): choose one of auto, off, max"),
        (Step, {"accumulate": 2, "batch_stats": "global"}, "batch_stats='global' .* accumulate=2 .* choose one"),
        (Step, {"accumulate": 2, "micro_batch_size": 5}, "accumulate=2 .* micro_batch_size=5 .* choose one"),
        (Step, {"shares": "evenly"}, "shares='evenly': give one number per device, 'measured', or None"),
        (Checkpoints, {"every": 0}, r"Checkpoints\(every=0\): give a whole number of at least 1"),
        (Checkpoints, {"every": 1.5}, r"Checkpoints\(every=1\.5\): give a whole number"),
        (Workers, {"hang_seconds": 0}, r"Workers\(hang_seconds=0\.0\): give a number of seconds above zero"),
        (Workers, {"hang_seconds": "x"}, r"Workers\(hang_seconds='x'\): give a number of seconds"),
        (Limits, {"max_steps": 0}, r"Limits\(max_steps=0\): give a whole number of at least 1"),
        (Limits, {"max_time": "2 fortnights"}, r"Limits\(max_time='2 fortnights'\): give '2h'"),
        (Limits, {"max_time": -1}, r"Limits\(max_time=-1\): give '2h'"),
        (Limits, {"evaluate_every": 500}, r"Limits\(evaluate_every=500\): say of what, '500 steps' or '2 epochs'"),
        (Limits, {"evaluate_every": "0 steps"}, "say of what"),
        (
            Limits,
            {"limit_batches": 1.5},
            r"Limits\(limit_batches=1.5\): give a number of batches .*, as 0.1 \(1.0 is all\)",
        ),
        (Limits, {"limit_val_batches": True}, "give a number of batches"),
        (Limits, {"limit_batches": 2, "overfit_batches": 2}, "limit_batches=2 and overfit_batches=2: .* choose one"),
    ],
)
def test_values_that_no_job_can_have(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        kind(**options)


@pytest.mark.parametrize("shares", [[-1, 2], [0, 0], [], 3, [True, 1], [0.5, 0.9]])
def test_shares_that_are_none(shares: Any) -> None:
    with pytest.raises(BadShares):
        Step(shares=shares)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Step(acumulate=2), r"Step has no option acumulate: did you mean accumulate\?"),  # type: ignore[call-arg]
        (
            lambda: Step(sync_bn=True),
            "Step has no option sync_bn: it is called batch_stats here",
        ),  # type: ignore[call-arg]
        (lambda: Step(fast=False), "Step has no option fast: it is called optimize here"),  # type: ignore[call-arg]
        (lambda: Step(batch_size=8), r"Step has no option batch_size: write Trainer\(batch_size=8\)"),  # type: ignore[call-arg]
        (lambda: Step(every=8), r"Step has no option every: write Trainer\(checkpoints=mh\.Checkpoints\(every=8\)\)"),  # type: ignore[call-arg]
        (lambda: Workers(4), r"Workers takes its options by name: Workers\(per_device=\.\.\.\)"),  # type: ignore[misc]
    ],
)
def test_options_that_are_not_there(call: Any, said: str) -> None:
    with pytest.raises(UnknownOption, match=said):
        call()


def test_an_object_shows_what_is_not_the_default() -> None:
    assert (repr(Step()), repr(Checkpoints(keep=5))) == ("Step()", "Checkpoints(keep=5)")
    assert repr(Step(shares=[2, 1], optimize="off")) == "Step(shares=(2, 1), optimize='off')"


def test_an_object_is_a_value() -> None:
    step = Step(shares=np.array([0.75, 0.25]), accumulate=np.int64(2))  # type: ignore[arg-type]
    assert step == Step(shares=(0.75, 0.25), accumulate=2)
    assert hash(step) == hash(pickle.loads(pickle.dumps(step)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.accumulate = 3  # type: ignore[misc]


def test_the_run_folder_keeps_options_by_topic() -> None:
    settings = Settings(step=Step(shares=[np.float32(0.75), 0.25]), checkpoints=Checkpoints(every=np.int64(7)))  # type: ignore[arg-type]
    kept = json.loads(json.dumps(settings.as_dict()))
    assert kept == settings.as_dict()
    assert kept["step"]["shares"] == [0.75, 0.25]
    assert kept["checkpoints"] == {"every": 7, "keep": 3}
    assert kept["workers"] == {"per_device": 1, "hang_seconds": 60.0}


def test_durations_and_intervals() -> None:
    assert Limits(max_time="1h30m") == Limits(max_time=5400) == Limits(max_time=datetime.timedelta(hours=1.5))
    assert Limits(evaluate_every="2 epochs").evaluation == (2, "epochs")
    assert Limits(evaluate_every="10 steps").evaluation == (10, "steps")
    assert Limits().evaluation == (1, "epochs")


def test_parts_of_the_batches() -> None:
    hundred = SimpleNamespace(count=100, batch_size=None)
    found = [as_number(limit, hundred, 1, "limit") for limit in (None, 1.0, 1, 0.29, 0.999, 7)]
    assert found == [None, None, 1, 29, 99, 7]
    assert as_number(0.5, SimpleNamespace(count=None, loader=[0] * 5), 1, "limit") == 2
    with pytest.raises(BadSettings, match=r"limit=0.005 of 100 batches is none: .* at least 0.01"):
        as_number(0.005, hundred, 1, "limit")
    with pytest.raises(BadSettings, match="the loader has no __len__"):
        as_number(0.5, SimpleNamespace(count=None, loader=iter([])), 1, "limit")
