"""Tasks of a trace know the module that they belong to, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from manyhands.backends.torch import planning


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + self.mlp(self.norm(x)))


def modules(function: Callable[..., Any], *arguments: Any) -> dict[str, list[str]]:
    """The modules of all tasks that are not views, by the name of their operation."""
    found: dict[str, list[str]] = {}
    for task in planning.trace(function, planning.call(arguments, {})).tasks:
        if not task.is_view:
            found.setdefault(task.name, []).append(task.module)
    return found


X = torch.rand(2, 4)


def test_forward_and_backward_belong_to_the_same_module() -> None:
    net = nn.Sequential(Block(), Block())

    def gradients(x: torch.Tensor) -> Any:
        return torch.autograd.grad(net(x).square().sum(), list(net.parameters()))

    found = modules(gradients, X)
    assert found["native_layer_norm"] == ["0.norm", "1.norm"]
    assert found["addmm"] == ["0.mlp.0", "0.mlp.2", "1.mlp.0", "1.mlp.2"]
    assert found["gelu"] == ["0.mlp.1", "1.mlp.1"]
    assert found["sin"] == ["0", "1"]
    assert found["gelu_backward"] == ["1.mlp.1", "0.mlp.1"]
    assert found["native_layer_norm_backward"] == ["1.norm", "0.norm"]
    assert found["cos"] == ["1", "0"], "of the derivative of sin"


def test_what_no_submodule_calls_has_no_path() -> None:
    net = Block().requires_grad_(False)
    found = modules(lambda x: torch.tanh(net(x)), X)
    assert found["tanh"] == [""]
    assert found["sin"] == [""], "of the model itself"
    assert found["gelu"] == ["mlp.1"]
    assert modules(lambda x: x.sin(), X) == {"sin": [""]}


def test_a_module_that_the_outer_one_does_not_contain() -> None:
    """It is reached through a list, say: its own parts have paths."""
    hidden = [Block().requires_grad_(False)]

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hidden[0](x)

    assert modules(Outer(), X)["gelu"] == ["mlp.1"]
