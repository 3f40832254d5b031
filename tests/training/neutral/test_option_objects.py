"""Options by topic: each object checks its values when it is made, and an error says what to write."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from manyhands.errors import BadSettings, BadShares, UnknownOption
from manyhands.training.options import Checkpoints, Settings, Step, Workers


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Step, {"accumulate": 0}, r"Step\(accumulate=0\): give a whole number of at least 1"),
        (Step, {"accumulate": True}, r"Step\(accumulate=True\): give a whole number"),
        (Step, {"batch_stats": "none"}, r"Step\(batch_stats='none'\): choose one of per_device, global"),
        (Step, {"on_nan": "ignore"}, r"Step\(on_nan='ignore'\): choose one of stop, continue"),
        (Step, {"optimize": False}, r"Step\(optimize=False\): choose one of auto, off, max"),
        (Step, {"accumulate": 2, "batch_stats": "global"}, "batch_stats='global' .* accumulate=2 .* choose one"),
        (Step, {"shares": "evenly"}, "shares='evenly': give one number per device, 'measured', or None"),
        (Checkpoints, {"every": 0}, r"Checkpoints\(every=0\): give a whole number of at least 1"),
        (Checkpoints, {"every": 1.5}, r"Checkpoints\(every=1\.5\): give a whole number"),
        (Checkpoints, {"keep": 0}, r"Checkpoints\(keep=0\): give a whole number of at least 1"),
        (Workers, {"per_device": 0}, r"Workers\(per_device=0\): give a whole number of at least 1"),
        (Workers, {"hang_seconds": 0}, r"Workers\(hang_seconds=0\.0\): give a number of seconds above zero"),
        (Workers, {"hang_seconds": "x"}, r"Workers\(hang_seconds='x'\): give a number of seconds"),
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
        (lambda: Step(sync_bn=True), "Step has no option sync_bn: it is called batch_stats here"),  # type: ignore[call-arg]
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
