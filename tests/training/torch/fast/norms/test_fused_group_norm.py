"""Nets around GroupNorm: the mode that puts results off gives the losses and gradients of plain execution.

On a CPU our operations are made of PyTorch's; casts that autocast makes on a GPU are written out. Most nets are drawn
at random. A failing case prints its seed and its blocks; ``net_of(seed)`` is that net.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lanes_cases import NoLanes
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from manyhands.backends.torch.kernels import group_norm as kernels
from manyhands.training.torch.fast.build import normalises_groups
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


# What is put off, counted: nothing in 32 bits is written for nothing


class Cast(nn.Module):
    """A GroupNorm as autocast runs it: in float32, and not in channels_last."""

    def __init__(self, groups: int, channels: int, activation: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.activation = nn.GroupNorm(groups, channels), activation
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.group_norm(x.float().contiguous(), self.norm.num_groups, self.norm.weight, self.norm.bias)
        return (y if self.activation is None else self.activation(y)).to(x.dtype)


class Net(nn.Module):
    def __init__(self, activation: nn.Module | None) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3)
        self.norms = nn.ModuleList([Cast(4, 16, activation), Cast(2, 8, None)])
        self.head = nn.Linear(8, 4)
        self.first.bfloat16(), self.last.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norms[1](self.last(self.norms[0](self.first(x)))).float().mean((2, 3)))


def pair(activation: nn.Module | None) -> tuple[Net, Net, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(activation).to(memory_format=torch.channels_last)
    x = torch.randn(5, 3, 9, 9).bfloat16().to(memory_format=torch.channels_last)
    return net, copy.deepcopy(net), x


def step(net: Net, x: torch.Tensor, mode: FusedGroupNorms, poison: bool) -> torch.Tensor:
    net.zero_grad()
    mode.begin(poison=poison)
    with mode:
        loss = net(x).square().sum()
    with mode:
        loss.backward()
    return loss.detach()


class Written(TorchDispatchMode):
    """Counts operations that are left, by what they write."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor) and first.dim() == 4 and first.dtype is torch.float32:
            self.counts[str(func).split(".")[1]] += 1
        return result


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.SiLU(), nn.ReLU(True), nn.SiLU(True), nn.GELU()])
def test_results_are_those_of_pytorch(activation: nn.Module | None, poison: bool) -> None:
    plain, other, x = pair(activation)
    loss = plain(x).square().sum()
    loss.backward()
    mode = FusedGroupNorms()
    fused = step(other, x, mode, poison)
    torch.testing.assert_close(fused, loss.detach(), rtol=1e-3, atol=1e-3)
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)
    assert mode.counts["group normalisations"] == 2
    # The gradient past a GELU is PyTorch's: it is there in 32 bits.
    assert mode.counts["backward"] == (1 if isinstance(activation, nn.GELU) else 2)


def test_no_image_in_32_bits_is_written() -> None:
    _, net, x = pair(nn.SiLU())
    written = Written()
    with written:
        step(net, x, FusedGroupNorms(), poison=False)
    # They are allocated, not written; but the head's mean reads the last one, and gives a gradient of its form.
    assert set(written.counts) <= {"empty_like", "set_", "copy_", "div", "expand", "unsqueeze"}, written.counts
    assert written.counts["copy_"] == 1


def test_what_the_kernels_cannot_take_is_left_to_pytorch() -> None:
    mode = FusedGroupNorms()
    images = [torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4).bfloat16(), torch.randn(2, 6, 4, 4).bfloat16()]
    for x in images:
        with torch.no_grad(), mode:
            y = functional.group_norm(x.float(), 2)
            z = y + 0
        torch.testing.assert_close(z, functional.group_norm(x.float(), 2))
    assert not mode.counts
    assert not kernels.fits(torch.empty(0, 8, 4, 4).bfloat16().to(memory_format=torch.channels_last))


def test_which_models_have_groups() -> None:
    assert normalises_groups(nn.Sequential(nn.GroupNorm(2, 4)))
    assert not normalises_groups(nn.Sequential(nn.BatchNorm2d(4)))
