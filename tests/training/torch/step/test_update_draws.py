"""Optimizers that draw random numbers, and replicas that are compared at each checkpoint."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import as_if_killed
from torch import nn
from training_cases import WithNet, difference, fit, mlp, rows, same, vectors

from manyhands.errors import ResultsDiffer
from manyhands.training.checkpoints import store
from manyhands.training.options import Checkpoints
from manyhands.training.torch.ranks import replicas
from manyhands.training.torch.step.part import Turn
from manyhands.training.torch.step.update import UpdateDraws

CLOSE = 1e-12


class Langevin(torch.optim.SGD):
    """SGLD: noise in every update, here from three generators."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    noise = torch.randn_like(parameter) + float(np.random.normal())
                    parameter.add_(noise, alpha=0.01)


langevin = partial(Langevin, lr=0.1)


def private(parameters: Any) -> torch.optim.Optimizer:
    """DP-SGD: noise on the gradient of the whole batch, by a hook."""

    def add_noise(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad += 0.1 * torch.randn_like(parameter)

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(add_noise)
    return optimizer


@pytest.mark.parametrize("optimizer", [langevin, private])
def test_every_device_draws_the_same_numbers_in_the_update(optimizer: Any, tmp_path: Path) -> None:
    """On any number of them; a checkpoint compares the replicas."""
    weights, _ = fit(mlp(), vectors(), optimizer=optimizer)
    assert difference(weights, fit(mlp(), vectors(), lr=0.1)[0]) > 1e-3
    assert difference(weights, fit(mlp(), vectors(), optimizer=optimizer, seed=1)[0]) > 1e-3
    for ranks in (2, 3):
        run = tmp_path / str(ranks)
        assert difference(weights, fit(mlp(), vectors(), ranks, optimizer=optimizer, run=run)[0]) <= CLOSE


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_job_draws_what_it_would_have_drawn(ranks: int, tmp_path: Path) -> None:
    """Dropout, too, which draws other numbers on every rank."""
    how: dict[str, Any] = {"optimizer": langevin, "checkpoints": Checkpoints(every=1, keep=99)}
    weights, result = fit(mlp(dropout=0.5), vectors(), ranks, run=tmp_path / "whole", **how)
    killed = as_if_killed(tmp_path / "whole", 7)
    again, resumed = fit(mlp(dropout=0.5), vectors(), ranks, run=killed, resume="auto", **how)
    assert same(weights, again)
    assert rows(result) == rows(resumed)


def test_two_updates_of_a_batch_draw_other_numbers() -> None:
    draws = UpdateDraws(langevin(mlp().parameters()), torch.device("cpu"), 0, 0)
    other = UpdateDraws(langevin(mlp().parameters()), torch.device("cpu"), 0, 1)
    seen, state = [], torch.get_rng_state()
    for stream, step in ((draws, 0), (draws, 0), (draws, 1), (other, 0)):
        with stream.around_update(Turn(step)):
            seen.append(float(torch.rand(())))
    assert len(set(seen)) == 4
    assert torch.equal(torch.get_rng_state(), state)


class Drifting(WithNet):
    """The weight moves by something that each process knows alone."""

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.net[2].bias.data[0] += os.getpid() * 1e-15
        return super().forward(X)  # type: ignore[no-any-return]


def test_replicas_that_drift_stop_the_job(tmp_path: Path) -> None:
    fit(Drifting(), vectors(), run=tmp_path / "alone")
    run = tmp_path / "run"
    with pytest.raises(ResultsDiffer, match=r"'net.2.bias'.*rank 1.*max_norm"):
        fit(Drifting(), vectors(), 2, run=run, checkpoints=Checkpoints(every=6))
    assert store.latest(run / "checkpoints") is None


class _Together:
    """A world of ranks in one process: each says what it has, in turn."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self, kinds: list[bytes], models: list[nn.Module]) -> None:
        self.kinds, self.models = kinds, models

    def values(self, _: str) -> list[bytes]:
        return self.kinds

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        alike = len(set(self.kinds)) == 1
        return [replicas.numbers_of(model, alike=alike) for model in self.models]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_one_bit_is_seen_on_devices_of_one_kind(dtype: torch.dtype) -> None:
    models = [nn.ParameterDict({"a": nn.Parameter(torch.ones(3, 5).to(dtype))}) for _ in range(2)]
    for kinds in ([b"x", b"x"], [b"x", b"y"]):
        replicas.check(models[0], _Together(kinds, models))  # type: ignore[arg-type]
    with torch.no_grad():  # two changes that cancel in a sum
        models[1]["a"][0, 0] *= 1 + 2 * torch.finfo(dtype).eps
        models[1]["a"][1, 1] *= 1 - torch.finfo(dtype).eps
    with pytest.raises(ResultsDiffer, match="'a'"):
        replicas.check(models[0], _Together([b"x", b"x"], models))  # type: ignore[arg-type]
    replicas.check(models[0], _Together([b"x", b"y"], models))  # type: ignore[arg-type]
    with torch.no_grad():
        models[1]["a"][0] = 3
    with pytest.raises(ResultsDiffer, match="'a'"):
        replicas.check(models[0], _Together([b"x", b"y"], models))  # type: ignore[arg-type]
