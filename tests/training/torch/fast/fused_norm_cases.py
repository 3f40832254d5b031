"""What models do between a normalisation and a ReLU, and with what comes out of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Convolution and normalisation, something that is given as a function, and a head."""

    def __init__(self, between: Callable[..., torch.Tensor], **options: Any) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8, **options), nn.BatchNorm2d(8, **options)
        self.head = nn.Linear(8, 3)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.between(self, x).mean((2, 3)))


def residual(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = functional.relu(net.norm(x))
    y = net.other(net.second(y))
    y += x
    return functional.relu(y)


def convolution_in_the_shortcut(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Its backward comes before the normalisation's, and reads the same gradient, here a sum."""
    y = net.other(net.second(functional.relu(net.norm(x))))
    y = functional.relu(y + net.second(x))
    return net.second(net.second(y) + y)


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    return functional.relu(net.other(net.second(functional.relu(net.norm(x), inplace=True))), inplace=True)


def two_readers(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    return functional.relu(y) + torch.sigmoid(y) + y.flatten(2).mean(-1)[..., None, None]


def view_of_it(net: Net, x: torch.Tensor) -> torch.Tensor:
    return functional.relu(net.norm(x)[:, :, 2:])


def twice_the_same(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    return functional.relu(y + y) + functional.relu(net.norm(x))


def shortcut_changes(net: Net, x: torch.Tensor) -> torch.Tensor:
    z = net.second(x)
    y = net.norm(x) + z
    z.mul_(2)
    return functional.relu(y) + z


def weight_changes(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    with torch.no_grad():
        net.norm.bias.add_(1)
    return functional.relu(y)


def changes_past_autograd(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The ReLU's result says where gradients go, not what its normalisation would give now."""
    y = functional.relu(net.norm(x))
    net.norm.bias.data.add_(1)
    return net.second(y)


class Exchanged(torch.autograd.Function):
    """Gives the first of two, and the gradient to the second."""

    @staticmethod
    def forward(context: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one.view_as(one)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def gradient_of_another(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.other.weight.fill_(-1)
    return net.second(functional.relu(Exchanged.apply(net.norm(x), net.other(x))))


def other_additions(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = torch.add(net.norm(x), x, alpha=2)
    return functional.relu(y) + functional.relu(net.other(x) + 1) + functional.relu(net.other(x) + x.mean(0))


def many_blocks(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Gradients come to a ReLU from two sides, and go on to two sides."""
    for _ in range(3):
        x = residual(net, x)
    return net.second(x) + x


def other_numbers(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The same memory, read as whole numbers: above zero where the floating point numbers are."""
    y = net.norm(x)
    return y * (functional.relu(y.detach().view(torch.int64)) > 0)


def held(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.kept = net.norm(x)
    return functional.relu(net.kept)


def gradient_of_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    """What the gradient's gradient needs is held beyond the forward pass that the gradient is taken in."""
    y = functional.relu(net.norm(x))
    (gradient,) = torch.autograd.grad(y.square().mean(), net.norm.weight, create_graph=True)
    return y * gradient.square().sum()


def reads_running_statistics(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    return functional.relu(y) * (1 + net.norm.running_mean.sum() + net.norm.running_var[0])


def changes_running_statistics(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    net.norm.running_mean.data.mul_(0.5)
    return functional.relu(y)


def for_its_statistics(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.norm(x)
    return functional.relu(net.other(net.second(x)))


# What is simpler is in random_norm_cases.py.
WAYS = [
    residual, convolution_in_the_shortcut, in_place, two_readers, view_of_it, twice_the_same, shortcut_changes,
    weight_changes, changes_past_autograd, gradient_of_another, other_additions, many_blocks, other_numbers, held,
    gradient_of_gradient, reads_running_statistics, changes_running_statistics, for_its_statistics,
]  # fmt: skip
