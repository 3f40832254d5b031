"""Blocks whose activations are computed again: the same bits, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training_cases import difference, fit, vectors

from manyhands.errors import BadSettings
from manyhands.training.options import Settings, Step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, X: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return X + scale * self.layers(X)


class Deep(nn.Module):
    """Blocks with dropout and running statistics, in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.double()

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        X = self.first(X)
        for block in self.blocks:
            X = block(X, scale=0.5)
        return self.last(X)  # type: ignore[no-any-return]


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


@pytest.mark.parametrize(("pick", "ranks"), [(True, 1), (is_block, 1), (is_block, 2)])
def test_the_bits_are_the_same(pick: Any, ranks: int) -> None:
    """Dropout draws the same numbers again, and BatchNorm counts each batch once."""
    plain, _ = fit(Deep(), vectors(), ranks)
    model = Deep()
    weights, _ = fit(model, vectors(), ranks, step=Step(activation_checkpointing=pick))
    assert difference(plain, weights) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_fewer_activations_are_kept() -> None:
    from manyhands.training.torch.step import activation_checkpoints

    def kept(model: nn.Module) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: sizes.append(one.numel()) or one, lambda one: one):
            model(vectors()[0])
        return sum(sizes)

    model = Deep()
    before = kept(model)
    checkpointed = activation_checkpoints.of(model, True, statistics=None)
    assert kept(model) < before / 2
    assert checkpointed.why_not_captured() is not None  # dropout: such blocks are not captured in a CUDA graph
    checkpointed.close()
    assert kept(model) == before


def test_what_cannot_be() -> None:
    with pytest.raises(BadSettings, match=r"activation_checkpointing=True\): Linear has no blocks"):
        fit(nn.Linear(6, 3).double(), vectors(), 1, step=Step(activation_checkpointing=True))
    with pytest.raises(BadSettings, match="picks no module of Deep"):
        fit(Deep(), vectors(), 1, step=Step(activation_checkpointing=lambda module: False))
    with pytest.raises(BadSettings, match="activation_checkpointing and optimize="):
        Step(activation_checkpointing=True, optimize="max")
    with pytest.raises(BadSettings, match="ranks would wait for each other's statistics"):
        fit(Deep(), vectors(), 1, step=Step(activation_checkpointing=True, batch_stats="global"))
    with pytest.raises(BadSettings, match=r"Step\(activation_checkpointing=3\): choose one of True, False, or a funct"):
        Step(activation_checkpointing=3)  # type: ignore[arg-type]


def test_the_function_is_named_in_the_run() -> None:
    settings = Settings(step=Step(activation_checkpointing=is_block))
    assert settings.as_dict()["step"]["activation_checkpointing"] == "is_block"
