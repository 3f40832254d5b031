"""``Step(shard=True)``: FSDP2 over the ranks of a job, with the update of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training_cases import CLASSES, difference, fit, rows, vectors

from manyhands.errors import BadSettings
from manyhands.training.options import Step
from manyhands.training.torch.trainer import Trainer

CLOSE = 1e-12
TWO: dict[str, Any] = {"devices": "cpu:2", "quiet": True, "batch_size": 16, "precision": "fp64"}


class Blocks(nn.Module):
    """Two blocks in a list, a layer with statistics, and weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(8, CLASSES)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        X = self.first(X)
        for block in self.blocks:
            X = X + block(X) * self.scale.mean()
        return self.last(X)  # type: ignore[no-any-return]


class Counting(torch.optim.AdamW):
    """Writes down how many bytes of weights and states this rank holds."""

    def __init__(self, parameters: Any, folder: str) -> None:
        super().__init__(parameters, lr=0.01)
        self.folder = folder

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        held = [p for group in self.param_groups for p in group["params"]]
        held += [one for state in self.state.values() for one in state.values() if one.dim()]
        local = sum((one.to_local() if hasattr(one, "to_local") else one).nbytes for one in held)
        (Path(self.folder) / str(dist.get_rank())).write_text(json.dumps(local))


def test_two_ranks_are_one_device_and_hold_a_half_each(tmp_path: Path) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return Counting(parameters, str(tmp_path)) if dist.is_initialized() else torch.optim.AdamW(parameters, lr=0.01)

    how: dict[str, Any] = {"optimizer": optimizer, "gradient_clip_val": 0.1, "lr": None}
    alone, metrics = fit(Blocks(), (vectors(), vectors(33)), 1, **how)
    step = Step(shard=True, accumulate=2, shares=[0.7, 0.3], activation_checkpointing=True)
    model = Blocks()
    together, shared = fit(model, (vectors(), vectors(33)), 2, **how, step=step)
    assert difference(alone, together) <= CLOSE
    for row, other in zip(rows(metrics), rows(shared), strict=True):
        assert [row[name] for name in row] == pytest.approx([other[name] for name in row], rel=CLOSE)
    whole = 3 * sum(parameter.nbytes for parameter in model.parameters())  # weights, and AdamW's two moments
    held = [json.loads((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert sum(held) == whole
    assert max(held) < 0.6 * whole


def test_runs_are_resumed_sharded_and_unsharded(tmp_path: Path) -> None:
    how: dict[str, Any] = TWO | {"optimizer": "adamw", "lr": 0.01}
    sharded, whole = {"step": Step(shard=True)}, {"step": Step()}
    straight = Blocks()
    Trainer(2, **how, **sharded).fit(straight, vectors())
    cases = (("same", sharded, sharded, 0.0), ("off", sharded, whole, CLOSE), ("on", whole, sharded, CLOSE))
    for name, first, second, bound in cases:
        Trainer(1, run=tmp_path / name, **how, **first).fit(Blocks(), vectors())
        resumed = Blocks()
        Trainer(2, run=tmp_path / name, resume="auto", **how, **second).fit(resumed, vectors())
        assert difference(straight.state_dict(), resumed.state_dict()) <= bound, name


class Stepping(Blocks):
    """A step of its own, with a mean over weighted labels."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], weight=batch[0].new_tensor([1.0, 2.0, 3.0]))


def test_a_step_of_the_models_own_and_an_empty_shard() -> None:
    data = vectors(33)  # the last batch has one sample, and so an empty shard
    alone, _ = fit(Stepping(), data, 1)
    together, _ = fit(Stepping(), data, 2, step=Step(shard=True))
    assert difference(alone, together) <= CLOSE


def test_what_does_not_go_together() -> None:
    model = Blocks()
    finished = torch.optim.SGD(model.parameters(), 0.1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": finished, "step": Step(shard=True)}, "an optimizer object holds whole parameters"),
        ({"step": Step(shard=True, on_nan="continue")}, "on_nan='continue' keeps whole copies"),
    ]
    for options, said in cases:
        with pytest.raises(BadSettings, match=said):
            Trainer(1, **(TWO | options)).fit(model, vectors())
    fit(Blocks(), vectors(), 1, step=Step(shard=True))  # one device: nothing to divide
