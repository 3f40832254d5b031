"""Models whose backward passes have all that side lanes meet, and lanes for a host without streams."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.book import torch as models


class NoLanes:
    """What a host without streams offers: everything is over at once. It counts what it is asked for."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits: list[tuple[int, int]] = []
        self.current = 0

    def mark(self, lane: int) -> int:
        self.marks += 1
        return self.marks

    def wait(self, lane: int, mark: int) -> None:
        assert 0 < mark <= self.marks
        self.waits.append((lane, mark))

    @contextlib.contextmanager
    def on(self, lane: int) -> Any:
        self.current, before = lane, self.current
        yield
        self.current = before


class Shared(nn.Module):
    """One linear layer used twice, a convolution used twice, a weight that is a weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.first, self.twice, self.tied = nn.Conv2d(1, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.twice.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.conv(self.first(x)).relu()).mean((2, 3))
        return self.tied(self.twice(self.twice(x).relu()).relu())


class Together(nn.Module):
    """Grouped, strided, dilated, transposed, one-dimensional; a linear layer on three dimensions; x @ x."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 8, 3, groups=4, bias=False),
            nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 2, 1, dilation=1, stride=2),
        )  # fmt: skip
        self.line, self.out = nn.Conv1d(2, 3, 3, padding=2, dilation=2), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(self.net(x).flatten(2))
        y = self.out(y.transpose(1, 2)).mean(1)
        square = y.t() @ y
        return y @ (square @ square)


class Words(nn.Module):
    """Embeddings: one used once, one used twice, one whose weight is also that of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.tied = (nn.Embedding(16, 8, padding_idx=2) for _ in range(3))
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x[:, 0, :4] * 16).long()
        y = self.once(words[..., 0]) + self.twice(words[..., 1]) * self.twice(words[..., 2]) + self.tied(words[..., 3])
        return self.out(y.mean(1))


def _frozen() -> nn.Module:
    net = models.lenet()
    net[0].weight.requires_grad_(False)
    net[7].bias.requires_grad_(False)
    net[9].weight.requires_grad_(False)
    return net


def _hooked() -> nn.Module:
    net = models.lenet()
    net[3].weight.register_hook(lambda gradient: gradient * 2)
    net[7].weight.register_post_accumulate_grad_hook(_tripled)
    net[9].bias.register_hook(lambda gradient: gradient + 1)
    return net


def _tripled(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(3)


def _autocast(net: nn.Module) -> nn.Module:
    inner = net.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(x)

    net.forward = forward  # type: ignore[method-assign]
    return net


class Kept(nn.Module):
    """LeNet whose saved tensors are computed again, or lie elsewhere, when the backward pass asks for them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = models.lenet(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "elsewhere":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return self.net(x)
        first = checkpoint(self.net[:6], x.requires_grad_(), use_reentrant=self.how == "reentrant")
        return checkpoint(self.net[6:], first, use_reentrant=self.how == "reentrant")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.mlp,
    "lenet": models.lenet,
    "small resnet": models.small_resnet,
    "resnet-18": models.resnet18,
    "channels last": lambda: models.small_resnet().to(memory_format=torch.channels_last),
    "shared weights": Shared,
    "all kinds of convolutions": Together,
    "embeddings": Words,
    "frozen weights": _frozen,
    "hooks": _hooked,
    "autocast": lambda: _autocast(models.lenet()),
    "checkpointed": lambda: Kept("not reentrant"),
    "checkpointed, reentrant": lambda: Kept("reentrant"),
    "saved elsewhere": lambda: Kept("elsewhere"),
    "autocast, shared": lambda: _autocast(Shared()),
}


def loss_of(net: nn.Module, size: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(size, 1, 28, 28, generator=generator)
    output = net(x).float()
    return nn.functional.cross_entropy(output, torch.arange(size) % output.shape[1])


def gradients(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in net.named_parameters(remove_duplicate=False)}


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    other = make()
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    return plain, other


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, gradient in one.items():
        mine = other[name]
        assert (gradient is None) == (mine is None), name
        if gradient is not None:
            assert torch.equal(gradient, mine), name
            assert gradient.stride() == mine.stride(), name
