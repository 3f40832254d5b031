"""The models that examples and experiments train, written with Keras's own layers.

Images are 28 by 28 (Fashion-MNIST) with the channels last, unless a docstring says more. A layer bears the name that
PyTorch's twin of the model gives it (``3``, ``resnet_block2.0``), so that weights can go from one to the other; where
channels are laid out in a row, they are laid out as PyTorch does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

from manyhands.training.book.architecture import RESNET18, SMALL_RESNET, residual_width

_LAST = "channels_last"  # said everywhere: a program may have another default


@keras.saving.register_keras_serializable("manyhands")
class Residual(keras.Layer):  # type: ignore[misc]
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(128, use_1x1conv=True, strides=2)`` halves the image and gives 128 channels. Keras sees at the first call
    how many come in; ``Residual(64, 128, ...)``, with both numbers, is the same.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        self.arguments = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "use_1x1conv": use_1x1conv,
            "strides": strides,
        }
        # Padding "same" would put a stride of two on other pixels than PyTorch's, which pads both sides alike.
        self.pad = layers.ZeroPadding2D(1, data_format=_LAST, name="pad")
        self.conv1 = layers.Conv2D(width, 3, strides, data_format=_LAST, name="conv1")
        self.conv2 = layers.Conv2D(width, 3, padding="same", data_format=_LAST, name="conv2")
        self.conv3 = layers.Conv2D(width, 1, strides, data_format=_LAST, name="conv3") if use_1x1conv else None
        self.bn1, self.bn2 = _batch_norm("bn1"), _batch_norm("bn2")

    def build(self, input_shape: Sequence[int | None]) -> None:
        padded = self.pad.compute_output_shape(input_shape)
        inner = self.conv1.compute_output_shape(padded)
        for layer, shape in ((self.conv1, padded), (self.bn1, inner), (self.conv2, inner), (self.bn2, inner)):
            layer.build(shape)
        if self.conv3 is not None:
            self.conv3.build(input_shape)

    def call(self, X: Any, training: bool | None = None) -> Any:
        Y = keras.ops.relu(self.bn1(self.conv1(self.pad(X)), training=training))
        Y = self.bn2(self.conv2(Y), training=training)
        around = X if self.conv3 is None else self.conv3(X)
        return keras.ops.relu(Y + around)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Any:
        return self.conv1.compute_output_shape(self.pad.compute_output_shape(input_shape))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


def _batch_norm(name: str) -> keras.Layer:
    """Running statistics move by a tenth of the way, as PyTorch's do."""
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _resnet(num_classes, in_channels, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """A ResNet with one block a stage, for images of any size: one minute on two CPU cores."""
    return _resnet(num_classes, in_channels, **SMALL_RESNET)


def _resnet(num_classes: int, in_channels: int, widths: Sequence[int], blocks: int) -> keras.Sequential:
    net = [
        layers.Input((None, None, in_channels)),
        layers.Conv2D(widths[0], 3, padding="same", data_format=_LAST, name="0"),
        _batch_norm("1"),
        layers.ReLU(name="2"),
    ]
    before = widths[0]
    for stage, width in enumerate(widths, start=1):
        for block in range(blocks):
            halves = stage > 1 and block == 0
            name = f"resnet_block{stage}.{block}"
            net.append(Residual(before, width, use_1x1conv=halves, strides=2 if halves else 1, name=name))
            before = width
    net.append(layers.GlobalAveragePooling2D(data_format=_LAST, name="global_avg_pool"))
    net.append(layers.Dense(num_classes, name="fc.1"))
    return keras.Sequential(net)


def lenet(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    return keras.Sequential(
        [
            layers.Input((28, 28, in_channels)),
            layers.Conv2D(6, 5, padding="same", activation="relu", data_format=_LAST, name="0"),
            layers.MaxPooling2D(2, data_format=_LAST, name="2"),
            layers.Conv2D(16, 5, activation="relu", data_format=_LAST, name="3"),
            layers.MaxPooling2D(2, data_format=_LAST, name="5"),
            *_flatten(),
            layers.Dense(120, activation="relu", name="7"),
            layers.Dense(84, activation="relu", name="9"),
            layers.Dense(num_classes, name="11"),
        ]
    )


def mlp(num_classes: int = 10, in_channels: int = 1) -> keras.Sequential:
    """One hidden layer of 256: the smallest model that learns something."""
    return keras.Sequential(
        [
            layers.Input((28, 28, in_channels)),
            *_flatten(),
            layers.Dense(256, activation="relu", name="1"),
            layers.Dense(num_classes, name="3"),
        ]
    )


def _flatten() -> list[keras.Layer]:
    """Channel by channel, as where the channels come first."""
    return [layers.Permute((3, 1, 2), name="channels_first"), layers.Flatten(name="flatten")]


MODELS: dict[str, Callable[..., keras.Sequential]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


def initialise(net: Any, seed: int | None = None) -> Any:
    """Draw new parameters for all dense and convolutional layers, and give the same net.

    Weights are Xavier uniform, biases uniform within one over the root of the inputs. They are drawn on the host, so
    that a seed gives the same net on every device, and without touching the random state of the program.
    """
    random = np.random.RandomState(seed)
    inputs: dict[str, int] = {}
    for variable in net.weights:
        layer, _, name = variable.path.rpartition("/")
        if name == "kernel":
            area = math.prod(variable.shape[:-2])
            inputs[layer] = area * variable.shape[-2]
            bound = math.sqrt(6 / (inputs[layer] + area * variable.shape[-1]))
        elif name == "bias" and layer in inputs:
            bound = 1 / math.sqrt(inputs[layer])
        else:
            continue
        variable.assign(random.uniform(-bound, bound, variable.shape))
    return net
