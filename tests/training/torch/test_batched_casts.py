"""Casts of weights and counts of batches at once: the same bits, whoever asks for them in between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.training.torch.book import models
from manyhands.training.torch.fast.batched_casts import BatchedCasts
from manyhands.training.torch.step.eager import Numbers

X = torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))


class Calls(TorchDispatchMode):
    """Counts the operations that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def passed(net: nn.Module, *modes: TorchDispatchMode, steps: int = 3) -> list[torch.Tensor]:
    """Losses, gradients and buffers of some steps, whose updates change the weights."""
    found: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for mode in modes:
            mode.__enter__()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(X).float().square().mean()
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in net.buffers()]
    return found


def test_a_net_computes_the_same() -> None:
    net = models.initialise(models.small_resnet(), seed=0)
    batched, calls = BatchedCasts(), Calls()
    plain = passed(copy.deepcopy(net))
    for ours, theirs in zip(passed(net, calls, batched), plain, strict=True):
        assert torch.equal(ours, theirs)
    weights = [name for name, _ in net.named_parameters() if "norm" not in name and "bn" not in name]
    assert batched.counts["counts of batches"] == sum(isinstance(one, nn.BatchNorm2d) for one in net.modules())
    assert 15 < batched.counts["casts of weights"] <= len(weights)
    casts = calls.names.count("aten._to_copy.default")
    assert casts < 2 * batched.counts["casts of weights"]  # one each in the first step; later only those of activations
    assert calls.names.count("aten._foreach_copy_.default") == 2
    assert "casts of weights" in batched.explain()


class Asking(nn.Module):
    """Uses a norm twice and reads its count; changes a weight in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        assert self.norm.num_batches_tracked is not None
        self.seen.append(int(self.norm.num_batches_tracked))
        x = self.first(self.norm(x))
        with torch.no_grad():
            self.second.weight.mul_(1.5)
        return self.second(x)


def test_what_is_asked_for_in_between() -> None:
    torch.manual_seed(0)
    net = Asking()
    plain = copy.deepcopy(net)
    theirs = passed(plain)
    for ours, other in zip(passed(net, BatchedCasts()), theirs, strict=True):
        assert torch.equal(ours, other)
    assert net.seen == plain.seen == [1, 3, 5]


def test_other_additions_are_no_counts() -> None:
    count = torch.tensor(0)
    with BatchedCasts():
        count.add_(1, alpha=3)
        count.add_(2)
        count.add_(1)
    assert count == 6


def test_a_net_whose_weights_are_exchanged() -> None:
    """New parameters in the old places, and none any more: only those of the last pass are cast ahead."""
    batched = BatchedCasts()
    for _ in range(3):
        layer = nn.Linear(4, 4)
        for _ in range(2):
            with batched, torch.autocast("cpu", dtype=torch.bfloat16):
                ours = layer(torch.ones(2, 4))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(ours, functional.linear(torch.ones(2, 4), layer.weight, layer.bias))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_say_how_they_lie(channels: int) -> None:
    """Also those of one channel, whose memory is the same either way."""
    images = torch.rand(2, channels, 5, 7)
    laid = Numbers(channels_last=True).lay((images, torch.zeros(2)))[0]
    assert laid.stride() == (5 * 7 * channels, 1, 7 * channels, channels)
    assert torch.equal(laid, images)
    assert nn.Conv2d(channels, 4, 3)(laid).is_contiguous(memory_format=torch.channels_last)
