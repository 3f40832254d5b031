"""The models that examples and experiments train: layer by layer the same in all frameworks.

A framework gives the layers, and :class:`Models` puts them together. So weights can go from one framework to another:
their names differ in the last part (``kernel`` is ``weight``), and in what stands before it. Where
kernels have their channels last, a convolution's is (height, width, in, out) and a dense layer's (in, out); PyTorch's
are (out, in, height, width) and (out, in), and these are the common ones. No framework has to be installed for that::

    torch        resnet_block2.0.conv3.weight
    jax          resnet_block2.0.conv3.kernel
    tensorflow   resnet_block2.0/conv3/kernel
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import WrongCheckpoint

M = TypeVar("M")  # a framework's model
Size = tuple[int | None, int | None, int]  # height, width and channels of an image


class Residual:
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(64, 128, use_1x1conv=True, strides=2)`` halves the image and doubles the channels. With one number,
    ``Residual(128, ...)``, it is the number of channels that come out; those that come in are seen at the first call
    (in JAX they are as many).
    """

    relu: Callable[[Any], Any]

    def _build(
        self,
        convolution: Callable[..., Any],
        norm: Callable[..., Any],
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
    ) -> None:
        """Make the layers; a convolution whose inputs are not known gets None for their number."""
        width, known = out_channels or in_channels, None if out_channels is None else in_channels
        self.conv1 = convolution(known, width, 3, strides, padding=1)
        self.conv2 = convolution(width, width, 3, padding=1)
        self.conv3 = convolution(known, width, 1, strides) if use_1x1conv else None
        self.bn1, self.bn2 = norm(width), norm(width)

    def _output(self, X: Any) -> Any:
        Y = self.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return self.relu(Y + around)


@dataclass(frozen=True)
class Models(Generic[M]):
    """The models, made of one framework's layers. Images are 28 by 28 (Fashion-MNIST), but for the ResNets."""

    convolution: Callable[..., Any]  # (inputs, outputs, size, strides=1, padding=0)
    linear: Callable[..., Any]  # (inputs, outputs)
    norm: Callable[..., Any]  # (width): batch normalisation whose statistics move by a tenth of the way
    residual: Callable[..., Any]  # (inputs, outputs, use_1x1conv=False, strides=1)
    relu: Callable[[], Any]
    pool: Callable[[], Any]  # the largest of each 2 by 2 pixels
    average: Callable[[], Any]  # the mean over all pixels of a channel, as one pixel
    flatten: Callable[[], Any]  # one row per sample, channel after channel
    # The layers one after the other, under these names, for images of that size; a list of layers is a chain within.
    chain: Callable[[Mapping[str, Any], Size], M]

    def resnet18(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
        return self._resnet(num_classes, in_channels, widths=(64, 128, 256, 512), blocks=2)

    def small_resnet(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """A ResNet with one block a stage, for images of any size: one minute on two CPU cores (more with JAX)."""
        return self._resnet(num_classes, in_channels, widths=(16, 32, 64), blocks=1)

    def lenet(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
        first = [self.convolution(in_channels, 6, 5, padding=2), self.relu(), self.pool()]
        second = [self.convolution(6, 16, 5), self.relu(), self.pool(), self.flatten()]
        dense = [self.linear(16 * 5 * 5, 120), self.relu(), self.linear(120, 84), self.relu()]
        return self._numbered_chain([*first, *second, *dense, self.linear(84, num_classes)], in_channels)

    def mlp(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """One hidden layer of 256: the smallest model that learns something."""
        hidden, output = self.linear(in_channels * 28 * 28, 256), self.linear(256, num_classes)
        return self._numbered_chain([self.flatten(), hidden, self.relu(), output], in_channels)

    def by_name(self) -> dict[str, Callable[..., M]]:
        """The models under the names of ``manyhands train --model``."""
        return {"resnet18": self.resnet18, "lenet": self.lenet, "small-resnet": self.small_resnet, "mlp": self.mlp}

    def _resnet(self, num_classes: int, in_channels: int, *, widths: Sequence[int], blocks: int) -> M:
        """The names of the parts are the book's, so that saved weights fit both ways."""
        stem = [self.convolution(in_channels, widths[0], 3, padding=1), self.norm(widths[0]), self.relu()]
        layers = numbered(stem)
        for number, (before, after) in enumerate(zip((widths[0], *widths), widths, strict=False), start=1):
            changes: dict[str, Any] = {} if number == 1 else {"use_1x1conv": True, "strides": 2}
            first = self.residual(before, after, **changes)
            layers[f"resnet_block{number}"] = [first, *(self.residual(after, after) for _ in range(blocks - 1))]
        layers["global_avg_pool"] = self.average()
        layers["fc"] = [self.flatten(), self.linear(widths[-1], num_classes)]
        return self.chain(layers, (None, None, in_channels))

    def _numbered_chain(self, layers: Sequence[Any], in_channels: int) -> M:
        return self.chain(numbered(layers), (28, 28, in_channels))


def numbered(layers: Sequence[Any]) -> dict[str, Any]:
    """Layers under their numbers."""
    return {str(number): layer for number, layer in enumerate(layers)}


# Names of weights

Tensors = dict[str, NDArray[Any]]
_COUNT = "num_batches_tracked"  # BatchNorm's, which only PyTorch has
_PYTORCH_NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class WeightNames:
    """How a framework names and lays out the weights of a layer, and of a batch normalisation."""

    layer: Sequence[str] = ("weight", "bias")
    norm: Sequence[str] = _PYTORCH_NORM
    separator: str = "."  # before the name of a part of a layer, or of a weight
    channels_last: bool = False
    counts_batches: bool = False  # BatchNorm has a number more

    def to_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        """A model's tensors under PyTorch's names (without ``num_batches_tracked``), laid out as PyTorch does."""
        kinds = dict(zip((*self.layer, *self.norm), (*_PYTORCH_NORM[:2], *_PYTORCH_NORM), strict=True))
        converted = {}
        for name, tensor in tensors.items():
            *path, kind = name.replace("/", ".").split(".")
            if kind == _COUNT:
                continue
            if kind not in kinds:
                raise _unknown_weight(name, model)
            converted[".".join([*path, kinds[kind]])] = self._transpose(tensor, (3, 2, 0, 1))
        return converted

    def from_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        """A model's tensors under the framework's names and in its layouts, of PyTorch's."""
        converted = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            kinds = self.norm if f"{layer}.running_mean" in tensors else self.layer
            if kind not in _PYTORCH_NORM[: len(kinds)]:
                raise _unknown_weight(name, model)
            # Numbers belong to the name of a layer: resnet_block2.0/conv3/kernel.
            new_name = re.sub(r"\.(?=\D)", self.separator, f"{layer}.{kinds[_PYTORCH_NORM.index(kind)]}")
            converted[new_name] = self._transpose(tensor, (2, 3, 1, 0))
            if kind == "running_mean" and self.counts_batches:
                # Only layers without a momentum read the count, and these models have none.
                converted[f"{layer}.{_COUNT}"] = np.array(0, dtype=np.int64)
        return converted

    def _transpose(self, tensor: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
        if not self.channels_last or tensor.ndim < 2:
            return tensor
        return np.ascontiguousarray(tensor.transpose(axes if tensor.ndim == 4 else None))


def _unknown_weight(name: str, model: str) -> WrongCheckpoint:
    return WrongCheckpoint(f"{name} is no tensor of {model}: only the built-in models can be converted")


WEIGHT_NAMES: Mapping[str, WeightNames] = {
    "torch": WeightNames(counts_batches=True),
    "jax": WeightNames(("kernel", "bias"), ("scale", "bias", "mean", "var"), channels_last=True),
    "tensorflow": WeightNames(
        ("kernel", "bias"),
        ("gamma", "beta", "moving_mean", "moving_variance"),
        separator="/",
        channels_last=True,
    ),
    "mxnet": WeightNames(norm=("gamma", "beta", "running_mean", "running_var")),
}
