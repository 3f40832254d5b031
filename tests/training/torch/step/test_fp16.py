"""float16 with a scaled loss, on the CPU as on a GPU."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import difference, fit, vectors

from manyhands.errors import BadSettings, LossIsNotANumber
from manyhands.training.options import Step
from manyhands.training.torch.step.loss_scale import LossScale
from manyhands.training.torch.step.part import Turn
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.trainer import Trainer


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    X, y = vectors()
    return X.float(), y


HALF: dict[str, Any] = {"precision": "fp16", "optimizer": partial(torch.optim.Adam, lr=0.01)}


def test_half_precision_trains_as_full_precision_does() -> None:
    exact, metrics = fit(net(), data(), 1, **(HALF | {"precision": "fp32"}))
    weights, result = fit(net(), data(), 1, **HALF, gradient_clip_val=100.0)
    assert 0 < difference(exact, weights) < 0.02
    assert result.rows[-1]["train_loss"] == pytest.approx(metrics.rows[-1]["train_loss"], rel=0.01)
    assert "fp16: the loss scale is 65536; 0 steps skipped because gradients were too large for it" in result.notes


def large(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Scaled by 65536 its gradients are too large for float16."""
    return nn.functional.cross_entropy(scores, y) * 20


def test_an_update_with_infinite_gradients_is_taken_back_and_counted() -> None:
    weights, result = fit(net(), data(), 1, **HALF, loss=large, max_epochs=1)
    (note,) = [note for note in result.notes if note.startswith("fp16")]
    skipped = int(note.split("; ")[1].split()[0])
    assert 1 <= skipped <= 4
    assert f"the loss scale is {65536 / 2**skipped:g};" in note
    assert all(one.isfinite().all() for one in weights.values())


def test_two_ranks_skip_steps_together() -> None:
    """Not always those of one device: a sum over half of the samples may be small enough for float16."""
    weights, result = fit(net(), data(), 2, **HALF, loss=large)
    assert all(one.isfinite().all() for one in weights.values())
    assert not any(note.startswith("fp16") and " 0 steps" in note for note in result.notes)
    assert difference(fit(net(), data(), 1, **HALF)[0], fit(net(), data(), 2, **HALF)[0]) < 0.02


def test_a_resumed_job_ends_with_the_same_bits(tmp_path: Path) -> None:
    how: dict[str, Any] = {**HALF, "loss": large, "batch_size": 16, "quiet": True}
    whole = net()
    Trainer(2, **how).fit(whole, data())
    Trainer(1, run=tmp_path / "run", **how).fit(net(), data())
    resumed = net()
    result = Trainer(2, run=tmp_path / "run", resume="auto", **how).fit(resumed, data())
    assert difference(whole.state_dict(), resumed.state_dict()) == 0
    assert not any(note.startswith("fp16") and " 0 steps" in note for note in result.notes)


def test_a_scale_that_collapses_ends_the_job(tmp_path: Path) -> None:
    """Gradients that are infinite at every scale: all steps are skipped. Resumed in between, it is found as well."""

    def huge(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, y) * 1e15

    how: dict[str, Any] = {**HALF, "loss": huge, "batch_size": 9, "run": tmp_path / "run", "resume": "auto"}
    Trainer(4, **how, quiet=True).fit(net(), data())
    with pytest.raises(LossIsNotANumber, match=r"fp16': the last 5\d steps were all skipped.*Give precision='bf16'"):
        Trainer(9, **how, quiet=True).fit(net(), data())


def test_the_scale_follows_the_rules_of_torch() -> None:
    cpu = torch.device("cpu")
    ours, theirs = LossScale(cpu, RunningSums(cpu)), torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    for gradient in (1.0, math.inf, 2.0, math.nan, *[1.0] * 2001):
        loss = (parameter * gradient).sum()
        optimizer.zero_grad()
        theirs.scale(loss).backward()
        parameter.grad, scaled = None, parameter.grad.clone()
        parameter.grad = scaled
        ours.after_backward(Turn(0), [parameter])
        ours.after_update(Turn(0))
        parameter.grad = scaled
        theirs.step(optimizer)
        theirs.update()
        assert float(ours.scale) == theirs.get_scale()
    assert ours.state_to_save()[0]["loss_scale"]["skipped"] == 2


def test_what_cannot_be() -> None:
    with pytest.raises(BadSettings, match=r"precision='float16': .* Did you mean 'fp16'\?"):
        Trainer(1, precision="float16")  # type: ignore[arg-type]
    fit(net(), data(), 1, **HALF, step=Step(on_nan="continue", accumulate=2))
