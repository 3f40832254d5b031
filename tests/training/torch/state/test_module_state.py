"""What a model holds beside its weights: it comes back from worker processes, and is in checkpoints."""

from __future__ import annotations

import json
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from training_cases import Rows, fit, mlp, vectors

from manyhands.training.checkpoints import store
from manyhands.training.options import Checkpoints, Step
from manyhands.training.torch.state import plain_json
from manyhands.training.torch.state.module_state import ModuleState, restore_final_state

calls = {"seen": 0}  # outside the model


class Average:
    """An average of weights, as people write it: a plain object."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, value in model.named_parameters():
            self.values[name] = 0.5 * self.values[name] + 0.5 * value.detach()


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.first = [self.weight]  # the parameter itself, not a copy

    def get_extra_state(self) -> Any:
        return {"scale": getattr(self, "scale", 0)}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        self.scale = getattr(self, "scale", 0) + 1
        return super().forward(X)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer()
        self.steps = 0
        self.losses: list[float] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.mean = torch.zeros(3, dtype=torch.float64)
        self.average = Average(self.layer)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.layer(X)  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> torch.Tensor:
        scores = self(batch[0])
        loss = functional.cross_entropy(scores, batch[1])
        self.steps += 1
        self.losses.append(float(loss))
        self.recent.append(self.steps)
        self.mean.mul_(0.9).add_(scores.detach().mean(0), alpha=0.1)
        self.average.update(self.layer)
        self.newest = {"loss": loss.detach()}
        return loss

    def validation_step(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.layer(batch[0]), batch[1])


def held(model: Counting) -> tuple[Any, ...]:
    return model.steps, model.losses, list(model.recent), model.mean.tolist(), model.average.updates, model.layer.scale


def test_it_comes_home_into_the_objects_that_are_there() -> None:
    model = Counting()
    losses, mean, average = model.losses, model.mean, model.average
    fit(model, vectors(48), 2)
    # Six steps of the first rank; one pass more, through a copy, has looked at the loss.
    assert (model.steps, len(losses), list(model.recent), average.updates) == (6, 6, [5, 6], 6)
    assert (model.layer.scale, model.newest.keys()) == (6, {"loss"})
    assert model.losses is losses
    assert model.mean is mean
    assert float(mean.abs().sum()) > 0
    assert model.average is average
    assert model.layer.first[0] is model.layer.weight


def test_as_on_one_device() -> None:
    alone, several = Counting(), Counting()
    fit(alone, vectors(48), step=Step(accumulate=2))
    fit(several, vectors(48), 2, step=Step(shares=[1, 0], accumulate=2))
    assert held(alone) == held(several)


def test_a_resumed_job_goes_on_with_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoints": Checkpoints(every=1, keep=20)}
    whole, resumed = Counting(), Counting()
    fit(whole, vectors(48), run=tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    store.drop_after(tmp_path / "killed" / "checkpoints", 4)
    _, result = fit(resumed, vectors(48), run=tmp_path / "killed", resume="auto", **options)
    named = "Counting.average (of type Average) has changed and stays with the job and is not in checkpoints"
    assert any(note.startswith(named) for note in result.notes)
    resumed.average.updates = whole.average.updates
    assert held(whole) == held(resumed)
    assert torch.equal(whole.newest["loss"], resumed.newest["loss"])


def test_values_as_json() -> None:
    array, tensors = np.arange(3.0), dict[str, torch.Tensor]()
    values: list[Any] = [
        None, True, 3, -0.5, float("inf"), "text", [1, (2, [])], {"a": {1: 2.0}}, {3, 4}, deque([1, 2]), deque([1], 5),
        [0.1] * 200, list(range(200)), array, torch.ones(2, 2),
    ]  # fmt: skip
    written = json.loads(json.dumps(plain_json.encode(values, tensors)))
    again = plain_json.decode(written, tensors, torch.device("cpu"))
    assert again[:-2] == values[:-2]
    assert (again[10].maxlen, again[-2].tolist(), again[-1].tolist()) == (5, [0.0, 1.0, 2.0], [[1.0, 1.0]] * 2)
    with pytest.raises(TypeError, match="an Average has no form in JSON"):
        plain_json.encode([Average(nn.Linear(1, 1))], tensors)


class Locked(nn.Module):
    """Holds something that cannot be sent, from its first step on; and counts outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.lock = threading.Lock()
        calls["seen"] += 1
        return functional.cross_entropy(self.net(batch[0]), batch[1])


def test_what_stays_is_noted() -> None:
    closed_over: list[int] = []

    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        closed_over.append(1)
        return functional.cross_entropy(scores, y)

    _, result = fit(Locked(), vectors(48), 2, max_epochs=1)
    assert any(
        "Locked.lock (of type lock) has changed and stays with its worker process" in note for note in result.notes
    )
    assert any(note.startswith("calls is a variable outside the model") for note in result.notes)
    _, result = fit(mlp(), vectors(48), 2, max_epochs=1, loss=loss)
    assert any(note.startswith("closed_over is a variable outside the model") for note in result.notes)
    _, result = fit(mlp(), vectors(48), 2, max_epochs=1)
    assert not any("outside" in note or "stays" in note for note in result.notes)


def test_layers_of_pytorch_have_not_changed() -> None:
    model = nn.Sequential(
        nn.LSTM(6, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2)
    )
    state = ModuleState(model)
    model.double()
    assert state.changed() == {}
    restore_final_state(model, state.final_state()[0])


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
