"""The models that examples and experiments train, written with Gluon's own layers.

Images are 28 by 28 (Fashion-MNIST) unless a docstring says more. A new model has shapes but, as always in Gluon, no
weights: :func:`initialise` draws them, ``net.initialize()`` too, and a trainer does for parameters without values.
They work in both of MXNet's modes, with ``mx.np`` (``npx.set_np()``) and with ``mx.nd``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.nn.conv_layers import _Conv

from manyhands.training.book.architecture import RESNET18, SMALL_RESNET, residual_width
from manyhands.training.mxnet.step import replicas


class Residual(nn.HybridBlock):  # type: ignore[misc]
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(64, 128, use_1x1conv=True, strides=2)`` halves the image and doubles the channels. With one
    number, ``Residual(128, ...)``, it is the number of channels that come out; those that come in are
    seen at the first call.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
        **of_block: Any,
    ) -> None:
        super().__init__(**of_block)
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        known = 0 if out_channels is None else in_channels
        self.conv1 = nn.Conv2D(width, 3, strides, padding=1, in_channels=known)
        self.conv2 = nn.Conv2D(width, 3, padding=1, in_channels=width)
        self.conv3 = nn.Conv2D(width, 1, strides, in_channels=known) if use_1x1conv else None
        self.bn1 = nn.BatchNorm(in_channels=width)
        self.bn2 = nn.BatchNorm(in_channels=width)
        self.relu = nn.Activation("relu")  # a layer, because the function has another name in each of MXNet's modes

    def hybrid_forward(self, F: Any, X: Any) -> Any:
        Y = self.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return self.relu(Y + around)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _resnet(num_classes, in_channels, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """A ResNet with one block a stage, for images of any size: one minute on two CPU cores."""
    return _resnet(num_classes, in_channels, **SMALL_RESNET)


def _resnet(num_classes: int, in_channels: int, widths: Sequence[int], blocks: int) -> nn.HybridSequential:
    """The names of the parts are the book's, in PyTorch, so that weights can move between the frameworks."""
    width = widths[0]
    stem = nn.Conv2D(width, 3, strides=1, padding=1, in_channels=in_channels)
    net = _sequential(stem, nn.BatchNorm(in_channels=width), nn.Activation("relu"))
    for number, (before, after) in enumerate(zip((width, *widths), widths, strict=False), start=1):
        first = Residual(before, after) if number == 1 else Residual(before, after, use_1x1conv=True, strides=2)
        rest = [Residual(after, after) for _ in range(blocks - 1)]
        net.register_child(_sequential(first, *rest), f"resnet_block{number}")
    net.register_child(nn.GlobalAvgPool2D(), "global_avg_pool")
    net.register_child(_sequential(nn.Flatten(), nn.Dense(num_classes, in_units=widths[-1])), "fc")
    return net


def lenet(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    return _sequential(
        nn.Conv2D(6, 5, padding=2, in_channels=in_channels),
        nn.Activation("relu"),
        nn.MaxPool2D(2),
        nn.Conv2D(16, 5, in_channels=6),
        nn.Activation("relu"),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Dense(120, in_units=16 * 5 * 5),
        nn.Activation("relu"),
        nn.Dense(84, in_units=120),
        nn.Activation("relu"),
        nn.Dense(num_classes, in_units=84),
    )


def mlp(num_classes: int = 10, in_channels: int = 1) -> nn.HybridSequential:
    """One hidden layer of 256: the smallest model that learns something."""
    return _sequential(
        nn.Flatten(),
        nn.Dense(256, in_units=in_channels * 28 * 28),
        nn.Activation("relu"),
        nn.Dense(num_classes, in_units=256),
    )


def _sequential(*layers: nn.HybridBlock) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*layers)
    return net


MODELS: dict[str, Callable[..., nn.HybridSequential]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


def initialise(net: Any, seed: int | None = None, *, only: Sequence[gluon.Parameter] | None = None) -> Any:
    """Draw new parameters for all dense and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases uniform by the number of inputs, as in PyTorch. NumPy draws them on the host, so
    that a seed gives the same net on every device, and without touching the random state of the program. Parameters of
    other layers that have no values yet get those that their layer wants. ``only``: of these parameters.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    wanted = None if only is None else set(map(id, only))
    drawn = [layer for layer in replicas.layers(net) if isinstance(layer, (nn.Dense, _Conv))]
    here = {id(parameter) for layer in drawn for parameter in (layer.weight, layer.bias)}
    for name, parameter in replicas.parameters(net).items():
        if parameter._data is None and not parameter._deferred_init:
            parameter.initialize(mx.init.Zero() if id(parameter) in here else None)
        if parameter._deferred_init:
            raise ValueError(
                f"parameter {name!r} has no shape yet, so nothing can be drawn for it: "
                "call the net once on a batch first, or use a layer that is given its input size"
            )
    for layer in drawn:
        shape = layer.weight.shape
        fan_in, fan_out = math.prod(shape[1:]), shape[0] * math.prod(shape[2:])
        bounds = [(layer.weight, math.sqrt(6 / (fan_in + fan_out)))]
        if layer.bias is not None:
            bounds.append((layer.bias, 1 / math.sqrt(max(fan_in, 1))))
        for parameter, bound in bounds:
            values = generator.uniform(-bound, bound, parameter.shape)
            if wanted is None or id(parameter) in wanted:
                set_values(parameter, values)
    return net


def set_values(parameter: gluon.Parameter, values: np.ndarray[Any, Any]) -> None:
    """The same values on every device where the parameter is."""
    for array in parameter.list_data():
        module = mx.np if isinstance(array, mx.np.ndarray) else mx.nd
        # From array to array: MXNet refuses to write NumPy's into weights that a forward pass has laid out for oneDNN.
        module.array(np.asarray(values), dtype=array.dtype, ctx=array.ctx).copyto(array)
