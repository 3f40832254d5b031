"""Callbacks beside a captured step: figures of steps, and an average of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from training_gpu_cases import captured, net, samples  # noqa: E402

from manyhands import torch as mh  # noqa: E402

IMAGES, LABELS = samples(330, 12, 5)


class Diary(mh.Callback):
    every = 5

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_steps(self, training: Any, figures: dict[str, float]) -> None:
        self.losses[training.step] = figures["train_loss"]


def dense() -> torch.nn.Module:
    """Without a bias before BatchNorm: rounding errors move it in the first step of a job, and in no other."""
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(144, 32, bias=False), torch.nn.BatchNorm1d(32), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 5))


def trained(
    epochs: int = 3, *, optimize: Any, make: Callable[[], Any] = net, **options: Any
) -> tuple[torch.nn.Module, mh.Result, Diary]:
    model, diary = make().double(), Diary()
    how: Any = {"devices": ["gpu:0"], "batch_size": 32, "quiet": True, "precision": "fp64", "lr": 0.05, **options}
    trainer = mh.Trainer(epochs, callbacks=[diary, mh.EMA(0.9)], step=mh.Step(optimize=optimize), **how)
    return model, trainer.fit(model, (IMAGES, LABELS), (IMAGES[:77], LABELS[:77])), diary


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def test_a_captured_step_keeps_the_same_average() -> None:
    (fast, result, diary), (plain, expected, by_plain_steps) = trained(optimize="auto"), trained(optimize="off")
    assert captured(result), result.notes
    assert difference(fast, plain) < 1e-10
    for row, other in zip(result.rows, expected.rows, strict=True):
        assert row["val_loss"] == pytest.approx(other["val_loss"], rel=1e-8)
    assert list(diary.losses) == list(by_plain_steps.losses) == [5, 10, 15, 20, 25, 30]
    for step, loss in diary.losses.items():
        assert loss == pytest.approx(by_plain_steps.losses[step], rel=1e-8)


def test_a_resumed_captured_job_ends_bit_equal(tmp_path: Path) -> None:
    whole, result, _ = trained(2, optimize="auto", make=dense, run=tmp_path / "whole")
    trained(1, optimize="auto", make=dense, run=tmp_path / "parts")
    parts, again, _ = trained(2, optimize="auto", make=dense, run=tmp_path / "parts", resume="auto")
    assert difference(whole, parts) == 0
    assert again.rows[1]["val_loss"] == result.rows[1]["val_loss"]
