"""Programs around BatchNorms, drawn at random: lists of lines, each of which takes some of the values before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHANNELS = 4
X = torch.rand(5, CHANNELS, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X = X.to(memory_format=torch.channels_last)


class Turned(torch.autograd.Function):
    """Gives its input away as a view, saves it, and turns gradients towards it."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return gradient + 0.1 * x.detach()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        # An epsilon that keeps norms of norms from blowing rounding up.
        options: list[dict[str, Any]] = [{}, {"affine": False}, {"track_running_stats": False}, {}]
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS, eps=0.1, **option) for option in options)
        self.norms[3].eval()
        self.register_buffer("seen", torch.zeros_like(X))
        self.gradients: list[torch.Tensor] = []

    def look(self, gradient: torch.Tensor) -> None:
        self.gradients.append(gradient)

    def twice(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul(2)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[2](self.convs[1](functional.relu(self.norms[0](x))))
        y += x
        return functional.relu(y)


def _without_gradient(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        z = functional.relu(net.norms[0](x) + y)
        net.seen += z
        return z + y


def _shift(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.norms[0].bias.data.add_(0.5)
    return x


def _hooked(net: Net, x: torch.Tensor, hook: Callable[..., Any]) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


def _kept(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.requires_grad and not x.is_leaf:
        x.retain_grad()
        net.gradients.append(x)
    return x


def _penalised(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = functional.relu(net.norms[0](x))
    if not z.requires_grad:
        return z
    (gradient,) = torch.autograd.grad(z.square().mean(), net.norms[0].weight, create_graph=True)
    return x * torch.tanh(gradient.sum())


LINES: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "conv": lambda net, x, y: net.convs[0](x),
    "norm": lambda net, x, y: net.norms[0](x),
    "bare": lambda net, x, y: net.norms[1](x),
    "stateless": lambda net, x, y: net.norms[2](x),
    "frozen": lambda net, x, y: net.norms[3](x),
    "relu": lambda net, x, y: functional.relu(x),
    "relu_": lambda net, x, y: functional.relu_(x),
    "add": lambda net, x, y: x + y,
    "add_": lambda net, x, y: x.add_(y),
    "scaled": lambda net, x, y: torch.add(x, y, alpha=2),
    "mul_": lambda net, x, y: x.mul_(1.5),
    "mul": lambda net, x, y: x * y,
    "residual": lambda net, x, y: net.residual(x),
    "again": lambda net, x, y: checkpoint(net.residual, x, use_reentrant=False),
    "sigmoid": lambda net, x, y: torch.sigmoid(x),
    "view": lambda net, x, y: x.view(torch.float64),
    "halves": lambda net, x, y: torch.cat([functional.relu(net.norms[0](value)) for value in x.split([2, 3])]),
    "part": lambda net, x, y: functional.pad(functional.relu(x[:3]), (0, 0, 0, 0, 0, 0, 0, 2)),
    "channels apart": lambda net, x, y: x.contiguous(),
    "leaf": lambda net, x, y: x.detach().requires_grad_(),
    "alias": lambda net, x, y: x.detach(),
    "past": lambda net, x, y: x.data.mul_(0.5),
    "without gradient": _without_gradient,
    "shift": _shift,
    "function": lambda net, x, y: Turned.apply(x),
    "look": lambda net, x, y: _hooked(net, x, net.look),
    "twice": lambda net, x, y: _hooked(net, x, net.twice),
    "kept": _kept,
    "penalised": _penalised,
}
LIKELY = ["norm", "stateless", "relu", "relu_", "add", "add_", "conv", "residual"]
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(LIKELY) | st.sampled_from(sorted(LINES)), st.integers(0, 3), st.integers(0, 3)),
    min_size=2,
    max_size=14,
)


def run(net: Net, program: list[tuple[str, int, int]]) -> torch.Tensor:
    values = [net.convs[0](X)]
    for name, one, other in program:
        values.append(LINES[name](net, values[-1 - one % len(values)], values[-1 - other % len(values)]))
    return torch.stack([torch.sin(value).sum() for value in values[-2:]]).sum() / 100
