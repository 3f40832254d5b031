"""GroupNorm fused with its casts and activation: the same results, and nothing in 32 bits is written for nothing.

On a CPU our operations are made of PyTorch's. The casts that autocast makes on a GPU are written out in these nets.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import group_norm
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.backends.torch.kernels import group_norm as kernels
from manyhands.training.torch.fast.build import normalises_groups
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms


class Cast(nn.Module):
    """A GroupNorm as autocast runs it: in float32, and not in channels_last."""

    def __init__(self, groups: int, channels: int, activation: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.activation = nn.GroupNorm(groups, channels), activation
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = group_norm(x.float().contiguous(), self.norm.num_groups, self.norm.weight, self.norm.bias)
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
            y = group_norm(x.float(), 2)
            z = y + 0
        torch.testing.assert_close(z, group_norm(x.float(), 2))
    assert not mode.counts
    assert not kernels.fits(torch.empty(0, 8, 4, 4).bfloat16().to(memory_format=torch.channels_last))


def test_which_models_have_groups() -> None:
    assert normalises_groups(nn.Sequential(nn.GroupNorm(2, 4)))
    assert not normalises_groups(nn.Sequential(nn.BatchNorm2d(4)))
