"""The models that examples and experiments train: layer by layer the same in all frameworks.

A framework gives the layers, and :class:`Models` puts them together. So weights can go from one framework to another:
their names differ in the last part (``kernel`` is ``weight``), and in some frameworks in the path before it. Where
kernels have their channels last, a convolution's is (height, width, in, out) and a dense layer's (in, out); PyTorch's
are (out, in, height, width) and (out, in), and these are the common ones. No framework has to be installed for that::

    torch        resnet_block2.0.conv3.weight
    jax          resnet_block2.layers.0.conv3.kernel
    tensorflow   resnet_block2.0/conv3/kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import WrongCheckpoint

M = TypeVar("M")  # a framework's model
Size = tuple[int | None, int | None, int]  # height, width and channels of an image


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
        layers = [
            self.convolution(in_channels, 6, 5, padding=2),
            self.relu(),
            self.pool(),
            self.convolution(6, 16, 5),
            self.relu(),
            self.pool(),
            self.flatten(),
            self.linear(16 * 5 * 5, 120),
            self.relu(),
            self.linear(120, 84),
            self.relu(),
            self.linear(84, num_classes),
        ]
        return self._numbered_chain(layers, in_channels)

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
        layers = {str(number): layer for number, layer in enumerate(stem)}
        for number, (before, after) in enumerate(zip((widths[0], *widths), widths, strict=False), start=1):
            changes: dict[str, Any] = {} if number == 1 else {"use_1x1conv": True, "strides": 2}
            first = self.residual(before, after, **changes)
            layers[f"resnet_block{number}"] = [first, *(self.residual(after, after) for _ in range(blocks - 1))]
        layers["global_avg_pool"] = self.average()
        layers["fc"] = [self.flatten(), self.linear(widths[-1], num_classes)]
        return self.chain(layers, (None, None, in_channels))

    def _numbered_chain(self, layers: Sequence[Any], in_channels: int) -> M:
        return self.chain({str(number): layer for number, layer in enumerate(layers)}, (28, 28, in_channels))


# Names of weights

Tensors = dict[str, NDArray[Any]]
_COUNT = "num_batches_tracked"  # BatchNorm's, which only PyTorch has
_PYTORCH_NORM = ("weight", "bias", "running_mean", "running_var")


def _same_name(layer: str, model: str) -> str:
    return layer


def _nnx_path(layer: str, model: str) -> str:
    """``fc.1`` is ``fc.layers.1``: a number is a layer of a Sequential. The first layers of a ResNet are a stem."""
    path = ".".join(f"layers.{part}" if part.isdecimal() else part for part in layer.split("."))
    return f"stem.{path}" if "resnet" in model and layer.isdecimal() else path


def _keras_path(layer: str, model: str) -> str:
    """A block of a ResNet has other layers in it; everywhere else the dots belong to a layer's name."""
    block, _, inside = layer.rpartition(".")
    return f"{block}/{inside}" if layer.startswith("resnet_block") else layer


@dataclass(frozen=True)
class WeightNames:
    """How a framework names and lays out the weights of a layer, and of a batch normalisation."""

    layer: Sequence[str] = ("weight", "bias")
    norm: Sequence[str] = _PYTORCH_NORM
    path: Callable[[str, str], str] = _same_name  # of a layer, of PyTorch's, given the name of the model
    separator: str = "."
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
            layer = [part for part in path if part not in ("layers", "stem")]
            converted[".".join([*layer, kinds[kind]])] = self._transpose(tensor, (3, 2, 0, 1))
        return converted

    def from_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        """A model's tensors under the framework's names and in its layouts, of PyTorch's."""
        converted = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            kinds = self.norm if f"{layer}.running_mean" in tensors else self.layer
            if kind not in _PYTORCH_NORM[: len(kinds)]:
                raise _unknown_weight(name, model)
            path = self.path(layer, model)
            new_name = f"{path}{self.separator}{kinds[_PYTORCH_NORM.index(kind)]}"
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
    "jax": WeightNames(("kernel", "bias"), ("scale", "bias", "mean", "var"), _nnx_path, channels_last=True),
    "tensorflow": WeightNames(
        ("kernel", "bias"),
        ("gamma", "beta", "moving_mean", "moving_variance"),
        _keras_path,
        separator="/",
        channels_last=True,
    ),
    "mxnet": WeightNames(norm=("gamma", "beta", "running_mean", "running_var")),
}
