"""The models that examples and experiments train, written with PyTorch's own layers.

Images are 28 by 28 (Fashion-MNIST) unless a docstring says more. All parameters exist as soon as a model is
made, so that it can be initialised, compiled, and sent to another process before it has seen a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from manyhands.backends.torch import compat
from manyhands.training.book.architecture import RESNET18, SMALL_RESNET, residual_width

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(64, 128, use_1x1conv=True, strides=2)`` halves the image and doubles the channels. With one
    number, ``Residual(128, ...)``, it is the number of channels that come out; those that come in are
    seen at the first call (PyTorch's lazy layers).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
    ) -> None:
        super().__init__()
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        known = None if out_channels is None else in_channels
        self.conv1 = _convolution(known, width, kernel_size=3, stride=strides, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv3 = _convolution(known, width, kernel_size=1, stride=strides) if use_1x1conv else None
        self.bn1 = nn.BatchNorm2d(width)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        Y = functional.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return functional.relu(Y + around)


def _convolution(
    in_channels: int | None, out_channels: int, *, kernel_size: int, stride: int, padding: int = 0
) -> nn.Conv2d:
    if in_channels is None:
        return nn.LazyConv2d(out_channels, kernel_size, stride, padding)
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _resnet(num_classes, in_channels, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """A ResNet with one block a stage, for images of any size: one minute on two CPU cores."""
    return _resnet(num_classes, in_channels, **SMALL_RESNET)


def _resnet(num_classes: int, in_channels: int, widths: Sequence[int], blocks: int) -> nn.Sequential:
    """The names of the parts are the book's, so that saved weights fit both ways."""
    width = widths[0]
    net = nn.Sequential(nn.Conv2d(in_channels, width, 3, stride=1, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    for number, (before, after) in enumerate(zip((width, *widths), widths, strict=False), start=1):
        first = Residual(before, after) if number == 1 else Residual(before, after, use_1x1conv=True, strides=2)
        rest = [Residual(after, after) for _ in range(blocks - 1)]
        net.add_module(f"resnet_block{number}", nn.Sequential(first, *rest))
    net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
    net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(widths[-1], num_classes)))
    return net


def lenet(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def mlp(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """One hidden layer of 256: the smallest model that learns something."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * 28 * 28, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


@torch.no_grad()
def initialise(net: AnyModule, seed: int | None = None) -> AnyModule:
    """Draw new parameters for all linear and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases by PyTorch's own rule. They are drawn on the host, so that a seed
    gives the same net on every device, and without touching the random state of the program.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for name, layer in net.named_modules():
        if not isinstance(layer, (nn.Linear, compat.Convolution)):
            continue
        if nn.parameter.is_lazy(layer.weight):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has no shape yet, so nothing can be drawn for it: "
                "call the net once on a batch first, or use a layer that is given its input size"
            )
        weight = torch.empty(layer.weight.shape)
        layer.weight.copy_(nn.init.xavier_uniform_(weight, generator=generator))
        if layer.bias is not None:
            bound = 1 / math.sqrt(max(weight[0].numel(), 1))
            layer.bias.copy_(torch.empty(layer.bias.shape).uniform_(-bound, bound, generator=generator))
    return net
