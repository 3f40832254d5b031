"""Any optimizer that makes one step from one gradient: saved, resumed, sent; others are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import difference, fit, mlp, same, vectors

from manyhands.errors import BadSettings, WorkerFailed
from manyhands.training.torch.state import job_state


class CountsPerGroup(torch.optim.Optimizer):
    """Counts its steps once for all parameters, in a tensor of their group, as timm's Lamb does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.zeros(())
            group["step"] += 1
            for parameter in group["params"]:
                parameter -= group["lr"] / float(group["step"]) * parameter.grad


class Around(torch.optim.Optimizer):
    """Has the state of another optimizer, not its own, as timm's Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "a rate on the device": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "a count of each group": CountsPerGroup,
    "around another": lambda parameters: Around(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
}


def resumed(folder: Path, optimizer: Any, before: int, after: int) -> dict[str, torch.Tensor]:
    """Weights after two epochs, the first on one number of ranks and the second on another."""
    fit(mlp(dropout=0.3), vectors(), before, optimizer=optimizer, max_epochs=1, run=folder)
    return fit(mlp(dropout=0.3), vectors(), after, optimizer=optimizer, run=folder, resume="auto")[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_bit_by_bit(name: str, tmp_path: Path) -> None:
    straight, _ = fit(mlp(dropout=0.3), vectors(), optimizer=OPTIMIZERS[name])
    assert same(straight, resumed(tmp_path / "run", OPTIMIZERS[name], 1, 1))


def test_adam_on_several_ranks(tmp_path: Path) -> None:
    adam = OPTIMIZERS["amsgrad"]
    straight, _ = fit(mlp(dropout=0.3), vectors(), 2, optimizer=adam)
    assert same(straight, resumed(tmp_path / "same", adam, 2, 2))

    def exact(folder: Path, before: int, after: int) -> dict[str, torch.Tensor]:
        fit(mlp(), vectors(), before, optimizer=adam, max_epochs=1, run=folder)
        return fit(mlp(), vectors(), after, optimizer=adam, run=folder, resume="auto")[0]

    alone, _ = fit(mlp(), vectors(), optimizer=adam)
    assert difference(alone, exact(tmp_path / "more", 1, 2)) < 1e-12
    assert difference(alone, exact(tmp_path / "fewer", 2, 1)) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizers_that_want_a_closure_are_refused(ranks: int) -> None:
    with pytest.raises(BadSettings, match="LBFGS works out the loss several times"):
        fit(mlp(), vectors(), ranks, optimizer=torch.optim.LBFGS)


def test_a_function_that_gives_no_optimizer() -> None:
    with pytest.raises(BadSettings, match="gave a NoneType among its optimizers"):
        fit(mlp(), vectors(), optimizer=lambda parameters: (torch.optim.SGD(parameters), None))


class Words(nn.Module):
    """A table of which a batch uses a few rows; its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)


def test_sparse_gradients() -> None:
    X, y = torch.arange(40) % 10, vectors(40)[1]
    alone, _ = fit(Words(), (X, y))
    assert difference(alone, fit(Words(), (X, y), 2)[0]) < 1e-12
    fit(Words(), (X, y), optimizer=torch.optim.SparseAdam)
    with pytest.raises(WorkerFailed, match="SparseAdam does not support dense gradients"):
        fit(Words(), (X, y), 2, optimizer=torch.optim.SparseAdam)


def parametrised(kind: str) -> nn.Module:
    net = mlp()
    how: Any = {
        "weight": nn.utils.parametrizations.weight_norm,
        "spectral": nn.utils.parametrizations.spectral_norm,
        "before parametrisations": nn.utils.weight_norm,
    }
    how[kind](net[0])
    return net


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    "kind",
    ["weight", *(pytest.param(name, marks=pytest.mark.long) for name in ("spectral", "before parametrisations"))],
)
def test_parametrised_models_are_sent_and_saved(kind: str, tmp_path: Path) -> None:
    net = parametrised(kind)
    net(vectors()[0])  # leaves a weight behind that is no leaf of autograd
    both, _ = fit(net, vectors(), 2, max_epochs=1, run=tmp_path / "run")
    alone, _ = fit(parametrised(kind), vectors(), 1, max_epochs=1)
    if kind != "spectral":  # whose vectors depend on nothing but the weights, yet move with every forward pass
        assert difference(alone, both) < 1e-12
    resumed, _ = fit(parametrised(kind), vectors(), 2, run=tmp_path / "run", resume="auto")
    assert not same(both, resumed)


def test_state_lies_in_memory_as_its_parameters_do() -> None:
    net = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    tensors, numbers = job_state.optimizer_state(optimizer)
    again = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    resumed = torch.optim.AdamW(again.parameters())
    job_state.restore_optimizer(resumed, job_state.pack(tensors), numbers)
    for name in ("exp_avg", "exp_avg_sq"):
        found = resumed.state[again.weight][name]
        assert found.stride() == again.weight.stride()
        assert torch.equal(found, optimizer.state[net.weight][name])
    again.to(memory_format=torch.contiguous_format)
    job_state.settle(resumed)
    assert resumed.state[again.weight]["exp_avg"].is_contiguous()
