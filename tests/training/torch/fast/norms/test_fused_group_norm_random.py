"""Random nets around GroupNorm: the mode that puts results off gives the losses and gradients of plain execution.

A failing case prints its seed and its blocks; ``net_of(seed)`` is that net.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lanes_cases import NoLanes
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from manyhands.training.torch.fast.lanes.eager import SideLanes
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms

CHANNELS, LOW = 16, torch.bfloat16
ACTIVATIONS: list[Callable[[Any], Any]] = [
    *(lambda y: y, functional.relu, functional.silu, functional.gelu),
    *(lambda y: functional.relu(y, inplace=True), lambda y: functional.silu(y, inplace=True)),
]


class Block(nn.Module):
    """A GroupNorm as autocast runs it, and something around it."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        super().__init__()
        self.kind, self.groups = kind, draw.choice([1, 2, 4, 16])
        self.activation, self.contiguous = draw.choice(ACTIVATIONS), draw.random() < 0.7
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).to(LOW)
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.weights = nn.ParameterList(torch.randn(CHANNELS) for _ in range(2 * (draw.random() < 0.8)))
        if self.weights and draw.random() < 0.3:
            self.weights[0].requires_grad_(False)
        self.held: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().contiguous() if self.contiguous else x.float()
        return functional.group_norm(wide, self.groups, *self.weights)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.activation(self.norm(x)).to(LOW))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.kind)(x)

    def two_readers(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return functional.silu(y).to(LOW) + y.to(LOW)

    def two_norms(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(x)).to(LOW) + functional.group_norm(x.float(), 2).to(LOW)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return (self.activation(self.norm(x)) + x.float()).to(LOW)

    def in_place_behind(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        y = self.norm(x)
        x.mul_(0.5)
        return self.activation(y).to(LOW) + x

    def past_autograd(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y.data.mul_(2)
        return (y * 1).to(LOW)

    def without_gradient(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            more = self.activation(self.norm(x)).to(LOW)
        return x + more

    def computed_again(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.plain, x, use_reentrant=False)

    def holding(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        self.held = [y.detach()]
        return (y * 1).to(LOW)

    def hooked(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 1.5)
        return functional.silu(y).to(LOW)

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.norm(x.clone()).clone(memory_format=torch.channels_last))
        return y.clone().to(LOW)

    def permuted(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.activation(self.norm(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).to(LOW)

    def sliced(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norm(x).chunk(2, 1)
        return torch.cat([functional.silu(first) * second, second], 1).to(LOW)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        return x + (torch.softmax(rows @ rows.mT, -1) @ rows).mT.reshape(x.shape).to(LOW)

    def squeezed(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.norm(x))
        return y.to(LOW) * y.mean((2, 3), keepdim=True).to(LOW).sigmoid()

    def weight_of_data(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.conv(x).mean((2, 3), keepdim=True).float()[0, :, 0, 0]
        return functional.group_norm(x.float(), self.groups, weight).to(LOW)


KINDS = [name for name, value in vars(Block).items() if callable(value) and name not in {"__init__", "forward", "norm"}]


def net_of(seed: int) -> nn.Module:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    blocks = [Block(draw.choice(KINDS), draw) for _ in range(draw.randint(1, 4))]
    first = nn.Conv2d(3, CHANNELS, 3, padding=1).to(LOW)
    return nn.Sequential(first, *blocks).to(memory_format=torch.channels_last)


def stepped(net: nn.Module, x: torch.Tensor, mode: FusedGroupNorms | None, lanes: bool) -> list[torch.Tensor]:
    net.zero_grad()
    with mode or nullcontext():
        loss = net(x).float().square().mean()
    with SideLanes(NoLanes(), 2) if lanes else nullcontext(), mode or nullcontext():
        loss.backward()
    held = [tensor for block in net if isinstance(block, Block) for tensor in block.held]
    return [loss.detach(), *held, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("seed", range(60))
def test_random_nets(seed: int) -> None:
    plain = net_of(seed)
    kinds = [block.kind for block in plain if isinstance(block, Block)]
    net, mode = copy.deepcopy(plain), FusedGroupNorms()
    x = torch.randn(4, 3, 6, 6).to(LOW).to(memory_format=torch.channels_last)
    expected = stepped(plain, x, None, lanes=False)
    for poison, lanes in ((True, False), (False, False), (False, True)):
        mode.begin(poison=poison)
        results = stepped(net, x, mode, lanes)
        assert len(results) == len(expected)
        for mine, theirs in zip(results, expected, strict=True):
            apart = float((mine.float() - theirs.float()).norm() / (theirs.float().norm() + 1e-2))
            assert apart < 0.05, f"seed {seed}, {kinds}, poison {poison}, lanes {lanes}"


def test_all_kinds_are_drawn() -> None:
    assert {block.kind for seed in range(60) for block in net_of(seed) if isinstance(block, Block)} == {*KINDS}


def test_a_model_that_fails_finds_what_it_holds() -> None:
    """When the step is made again, without this."""
    block, mode = Block("holding", random.Random(0)), FusedGroupNorms()
    x = torch.randn(2, CHANNELS, 4, 4).to(LOW).to(memory_format=torch.channels_last)

    def fail() -> None:
        block(x)
        raise ZeroDivisionError

    mode.begin(poison=True)
    with pytest.raises(ZeroDivisionError), mode:
        fail()
    torch.testing.assert_close(block.held[0], block.norm(x).detach())
