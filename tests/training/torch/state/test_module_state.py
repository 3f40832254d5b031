"""What a model holds beside its tensors: it comes back from worker processes, and is in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import as_if_killed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from training_cases import Rows, fit, mlp, vectors

from manyhands.training.options import Checkpoints, Step
from manyhands.training.torch.state import module_state


class Layer(nn.Linear):
    """Keeps state by PyTorch's own means."""

    def __init__(self) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.scale: Any = {"passes": 0, "mean": torch.zeros(3)}

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        scores = super().forward(X)
        if self.training:
            self.scale["passes"] += 1
            self.scale["mean"] = self.scale["mean"] + scores.detach().mean(0).float()
        return scores


class Annealed(nn.Module):
    """Has a weight of its loss that grows with every step, a flag, and a phase."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer()
        self.steps, self.is_warm, self.phase = 0, False, "first"
        self.best = float("inf")

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.layer(X)  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> torch.Tensor:
        self.steps += 1
        self.is_warm, self.phase = self.steps > 2, f"after {self.steps}"
        self.weight = np.float64(0.1) * self.steps
        return self.weight * functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.layer(batch[0]), batch[1])


def held(model: Annealed) -> tuple[Any, ...]:
    scale = model.layer.scale
    return model.steps, model.is_warm, model.phase, model.weight, scale["passes"], scale["mean"].tolist()


def test_as_on_one_device() -> None:
    alone, several = Annealed(), Annealed()
    fit(alone, vectors(48), step=Step(accumulate=2))
    fit(several, vectors(48), 2, step=Step(shares=[1, 0], accumulate=2))
    assert held(alone) == held(several)
    assert several.best == float("inf")


def test_a_resumed_job_is_the_same_job(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoints": Checkpoints(every=1, keep=20)}
    whole, resumed = Annealed(), Annealed()
    fit(whole, vectors(48), run=tmp_path / "whole", **options)
    fit(resumed, vectors(48), run=as_if_killed(tmp_path / "whole", 4), resume="auto", **options)
    assert held(whole) == held(resumed)
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_values_as_json() -> None:
    tensors = dict[str, torch.Tensor]()
    values: list[Any] = [
        None, True, 3, -0.5, float("inf"), "text", [1, (2, [])], {"a": {1: 2.0}}, {3, 4}, np.arange(3.0), torch.ones(2)
    ]  # fmt: skip
    written = json.loads(json.dumps(module_state.encode(values, tensors), allow_nan=False))
    again = module_state.decode(written, tensors, torch.device("cpu"))
    assert again[:-2] == values[:-2]
    assert (again[-2].tolist(), again[-1].tolist()) == ([0.0, 1.0, 2.0], [1.0, 1.0])
    with pytest.raises(TypeError, match="no form in JSON"):
        module_state.encode([object()], tensors)


def test_extra_state_that_json_cannot_hold_is_noted() -> None:
    model = Annealed()
    model.layer.scale["mean"] = torch.zeros(3)
    model.layer.scale["other"] = object
    _, result = fit(model, vectors(48), 2, max_epochs=1)
    assert any("get_extra_state of layer" in note for note in result.notes)


# User code runs once per step.


class Called(nn.Module):
    def __init__(self, *, steps: bool = False) -> None:
        super().__init__()
        self.net, self.forwards, self.losses = mlp(), 0, 0
        if steps:
            self.training_step = self._step

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.net(X)  # type: ignore[no-any-return]

    def _step(self, batch: Any) -> torch.Tensor:
        return self.loss(self(batch[0]), batch[1])

    def loss(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.losses += 1
        return functional.cross_entropy(scores, y)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("data", [vectors(40), Rows(40), DataLoader(Rows(40), 16, drop_last=True)])
@pytest.mark.parametrize("precision", ["auto", "fp64"])
def test_once_per_step_and_batch_of_the_test_set(steps: bool, data: Any, precision: str) -> None:
    model = Called(steps=steps)
    _, result = fit(model, (data, vectors(20)), loss=None if steps else model.loss, precision=precision)
    expected = result.rows[-1]["step"] + 2 * 2  # a loss of one's own may be no mean: two whole batches in each epoch
    assert (model.forwards, model.losses) == (expected, expected)


def test_a_known_loss_once_per_step_with_accumulate() -> None:
    model = Called()
    _, result = fit(model, vectors(32), step=Step(accumulate=2))
    assert model.forwards == 2 * result.rows[-1]["step"]


def test_a_trial_touches_nothing() -> None:
    """A loss that is tried leaves the caller's model and closures alone."""
    model, closed_over = Called(), list[int]()

    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        closed_over.append(len(y))
        return functional.cross_entropy(scores, y) * 2

    _, result = fit(model, vectors(32), step=Step(accumulate=2), loss=loss)
    assert model.forwards == len(closed_over) == 2 * result.rows[-1]["step"]
