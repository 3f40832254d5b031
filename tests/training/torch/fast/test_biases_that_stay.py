"""Biases whose layer's output, or which themselves, are used by more than a BatchNorm stay where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from manyhands.training.torch.fast.redundant_biases import BiasSearch, RedundantBiases

X = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(6) % 3


def loss_of(net: nn.Module) -> torch.Tensor:
    output = net(X)
    return output if output.dim() == 0 else functional.cross_entropy(output, Y)


def searched(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor] = loss_of) -> RedundantBiases | None:
    with BiasSearch(net) as search:
        value = loss(net)
        search.trace(value)
        value.backward()
    return search.redundant_biases()


def redundant_names(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor] = loss_of) -> list[str]:
    return names(net, searched(net, loss))


def names(net: nn.Module, redundant: RedundantBiases | None) -> list[str]:
    layers = [layer for layer, _ in redundant._bare] if redundant is not None else []
    return [name for name, module in net.named_modules() if module in layers]


class Tapped(nn.Module):
    """A convolution before a BatchNorm, and something else that is done with its output, its bias or its statistics."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.norm, self.kind = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), kind
        self.other, self.kept = nn.Conv2d(2, 3, 3), None
        self.register_buffer("mean", torch.zeros(()))
        self.double()
        if kind == "shared bias":
            self.other.bias = self.conv.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpointed":
            return checkpoint(lambda x: self.norm(self.conv(x)), x, use_reentrant=False).square().mean()
        if self.kind == "another function":
            return self.norm(functional.conv2d(x, self.conv.weight, self.conv.bias)).square().mean()
        if self.kind == "another weight":
            y = torch.func.functional_call(self.conv, {"weight": self.conv.weight * 2}, (x,))
        else:
            y = self.conv(x)
        if self.kind == "custom function in place":
            _OwnInPlace.apply(y)  # type: ignore[no-untyped-call]
        loss = self._with(x, self.norm(y), y)
        if self.kind == "penalty on the bias":
            loss = loss + self.conv.bias.square().sum()  # type: ignore[union-attr]
        elif self.kind == "custom function of the bias":
            loss = loss + _Own.apply(self.conv.bias).sum()  # type: ignore[no-untyped-call]
        elif self.kind == "penalty on all":
            loss = loss + torch.stack([one.norm() for one in self.parameters()]).sum()
        elif self.kind == "running mean":
            loss = loss + self.norm.running_mean.sum() * self.conv.weight.sum()
        elif self.kind == "own backward":
            self.conv.bias.square().sum().backward()  # type: ignore[union-attr]
        return loss

    def _with(self, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        uses: dict[str, Callable[[], torch.Tensor]] = {
            "residual": lambda: z + y,
            "penalty": lambda: z + y.square().mean(),
            "custom function": lambda: z + _Own.apply(y),  # type: ignore[no-untyped-call]
            "view": lambda: z + y[0, 0, 0, 0],
            "shared convolution": lambda: z + self.conv(x).mean(),
            "norm used twice": lambda: z + self.norm(y),
            "norm of two": lambda: z + self.norm(self.other(x)),
            "shared bias": lambda: z + self.other(x),
        }
        if self.kind == "statistics":
            self.mean = y.detach().mean()
        elif self.kind == "without a gradient":
            with torch.no_grad():
                self.mean = y.mean()
        elif self.kind == "called again":
            with torch.no_grad():
                self.mean = self.conv(x).mean()
        elif self.kind == "kept":
            self.kept = y
        elif self.kind == "read in backward":
            z.register_hook(lambda gradient: gradient * y.abs().max())
        return uses.get(self.kind, lambda: z)().square().sum()


class _Own(torch.autograd.Function):
    """Reads its input where no dispatch mode sees it, as a kernel of somebody's own would."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> Any:
        return torch.full(y.shape, ctypes.c_double.from_address(y.data_ptr()).value, dtype=y.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class _OwnInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> Any:
        ctx.mark_dirty(y)
        ctypes.c_double.from_address(y.data_ptr()).value *= 2
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


def test_what_is_tapped_is_found_where_nothing_is() -> None:
    assert redundant_names(Tapped("nothing")) == ["conv"]


@pytest.mark.parametrize(
    "kind",
    [
        "residual", "penalty", "custom function", "view", "shared convolution", "norm used twice", "norm of two",
        "shared bias", "statistics", "without a gradient", "kept", "read in backward", "penalty on the bias",
        "penalty on all", "running mean", "own backward", "checkpointed", "another function",
        "custom function of the bias", "called again", "another weight", "custom function in place",
    ],
)  # fmt: skip
def test_what_is_used_elsewhere_stays(kind: str) -> None:
    assert searched(Tapped(kind)) is None


class _Louder(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class _Own2d(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input.mean()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "evaluation": lambda net: net[1].eval(),
    "activation in place between": lambda net: net.insert(1, nn.ReLU(inplace=True)),
    "subclass": lambda net: net.__setitem__(0, _Louder(2, 3, 3).double()),
    "subclass of the norm": lambda net: net.__setitem__(1, _Own2d(3).double()),
    "cumulative average": lambda net: setattr(net[1], "momentum", None),
    "forward hook": lambda net: net[0].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda net: net[0].register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda net: net[0].register_full_backward_hook(lambda *_: None),
    "hook of the norm": lambda net: net[1].register_forward_pre_hook(lambda *_: None),
    "hook of the bias": lambda net: net[0].bias.register_hook(lambda gradient: gradient + 1),
    "parametrization": lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    "parametrized bias": lambda net: nn.utils.parametrize.register_parametrization(net[0], "bias", nn.Tanh()),
    "frozen weight": lambda net: net[0].weight.requires_grad_(False),
    "other forward": lambda net: setattr(net[0], "forward", lambda x: functional.conv2d(x, net[0].weight)),
    "instance norm": lambda net: net.__setitem__(1, nn.InstanceNorm2d(3).double()),
    "no bias": lambda net: net.__setitem__(0, nn.Conv2d(2, 3, 3, bias=False).double()),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", CHANGES)
def test_layers_that_are_not_as_they_come_stay(kind: str) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 3)).double()
    assert redundant_names(net) == ["0"]
    CHANGES[kind](net)
    assert searched(net) is None


def test_channels_that_are_not_the_norm_s() -> None:
    """A linear layer on three dimensions, a convolution of a single sample: BatchNorm1d takes another axis."""
    line = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(2)).double()
    assert searched(line, lambda net: net(X[:, :, 0]).square().sum()) is None
    single = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(6)).double()
    assert searched(single, lambda net: net(X[0, :, 0]).square().sum()) is None
