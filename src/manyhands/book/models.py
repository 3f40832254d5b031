"""The models that examples and experiments train: layer by layer the same in all frameworks.

A framework gives the layers (:class:`Models`), this file puts them together. So names of weights differ by rule: in the
last part (``kernel`` is ``weight``), and in some frameworks in the path before it. Where kernels have their channels
last, a convolution's is (height, width, in, out) and a dense layer's (in, out); PyTorch's are (out, in, height, width)
and (out, in), and these are the common ones. NumPy only: weights can be converted where no framework is installed::

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
class Layers(Generic[M]):
    """Makes a framework's layers, and a chain of them."""

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


@dataclass(frozen=True)
class Models(Generic[M]):
    """The models, made of one framework's layers. Images are 28 by 28 (Fashion-MNIST), but for the ResNets."""

    make: Layers[M]

    def resnet18(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
        return self._resnet(num_classes, in_channels, widths=(64, 128, 256, 512), blocks=2)

    def small_resnet(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """A ResNet with one block a stage, for images of any size: one minute on two CPU cores (more with JAX)."""
        return self._resnet(num_classes, in_channels, widths=(16, 32, 64), blocks=1)

    def lenet(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
        layers = [
            self.make.convolution(in_channels, 6, 5, padding=2),
            self.make.relu(),
            self.make.pool(),
            self.make.convolution(6, 16, 5),
            self.make.relu(),
            self.make.pool(),
            self.make.flatten(),
            self.make.linear(16 * 5 * 5, 120),
            self.make.relu(),
            self.make.linear(120, 84),
            self.make.relu(),
            self.make.linear(84, num_classes),
        ]
        return self._numbered(layers, in_channels)

    def mlp(self, num_classes: int = 10, in_channels: int = 1) -> M:
        """One hidden layer of 256: the smallest model that learns something."""
        layers = [
            self.make.flatten(),
            self.make.linear(in_channels * 28 * 28, 256),
            self.make.relu(),
            self.make.linear(256, num_classes),
        ]
        return self._numbered(layers, in_channels)

    def by_name(self) -> dict[str, Callable[..., M]]:
        """As ``manyhands train --model`` calls them."""
        return {"resnet18": self.resnet18, "lenet": self.lenet, "small-resnet": self.small_resnet, "mlp": self.mlp}

    def _resnet(self, num_classes: int, in_channels: int, *, widths: Sequence[int], blocks: int) -> M:
        """The names of the parts are the book's, so that saved weights fit both ways."""
        width = widths[0]
        layers: dict[str, Any] = {
            "0": self.make.convolution(in_channels, width, 3, padding=1),
            "1": self.make.norm(width),
            "2": self.make.relu(),
        }
        for number, (before, after) in enumerate(zip((width, *widths), widths, strict=False), start=1):
            changes: dict[str, Any] = {} if number == 1 else {"use_1x1conv": True, "strides": 2}
            first = self.make.residual(before, after, **changes)
            layers[f"resnet_block{number}"] = [first, *(self.make.residual(after, after) for _ in range(blocks - 1))]
        layers["global_avg_pool"] = self.make.average()
        layers["fc"] = [self.make.flatten(), self.make.linear(widths[-1], num_classes)]
        return self.make.chain(layers, (None, None, in_channels))

    def _numbered(self, layers: Sequence[Any], in_channels: int) -> M:
        return self.make.chain({str(number): layer for number, layer in enumerate(layers)}, (28, 28, in_channels))


def residual_width(in_channels: int, out_channels: int | None, *, use_1x1conv: bool, strides: int) -> int:
    """The output channels of ``Residual(...)``; refuses a block whose output cannot be added to its input."""
    asked = f"Residual({in_channels}, {out_channels}"
    if isinstance(out_channels, bool):
        raise TypeError(
            f"{asked}): the second number is the channels that come out. "
            f"Write Residual({in_channels}, use_1x1conv={out_channels})"
        )
    changed = strides != 1 or out_channels not in (None, in_channels)
    if changed and not use_1x1conv:
        raise ValueError(
            f"{asked}, strides={strides}) changes the shape, so its input cannot be added to its output as it is: "
            "write use_1x1conv=True"
        )
    return in_channels if out_channels is None else out_channels


# Names of weights

Tensors = dict[str, NDArray[Any]]
Path = list[str]  # the parts of a layer's name


def _unchanged(path: Path, model: str) -> Path:
    return path


@dataclass(frozen=True)
class WeightNames:
    """How a framework names and lays out the weights of a layer, and of a batch normalisation.

    ``layer`` and ``norm`` map the last part of a name to PyTorch's; ``path_to_common`` and ``path_from_common`` convert
    the path before it, given the name of the model.
    """

    layer: Mapping[str, str]
    norm: Mapping[str, str]
    separator: str = "."
    channels_last: bool = False
    path_to_common: Callable[[Path, str], Path] = _unchanged
    path_from_common: Callable[[Path, str], Path] = _unchanged

    def to_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        """A model's tensors under PyTorch's names (without ``num_batches_tracked``), laid out as PyTorch does."""
        common = {**self.layer, **self.norm}
        converted = {}
        for name, tensor in tensors.items():
            *path, kind = name.split(self.separator)
            if kind not in common:
                raise _unknown(name, model)
            new_name = ".".join([*self.path_to_common(path, model), common[kind]])
            converted[new_name] = self._transposed(tensor, (3, 2, 0, 1))
        return converted

    def from_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        """A model's tensors under the framework's names and in its layouts, of PyTorch's."""
        converted = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            normalises = f"{layer}.running_mean" in tensors
            framework = {common: name for name, common in (self.norm if normalises else self.layer).items()}
            if kind not in framework:
                raise _unknown(name, model)
            path = self.path_from_common(layer.split("."), model)
            converted[self.separator.join([*path, framework[kind]])] = self._transposed(tensor, (2, 3, 1, 0))
        return converted

    def _transposed(self, tensor: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
        if not self.channels_last or tensor.ndim < 2:
            return tensor
        return np.ascontiguousarray(tensor.transpose(axes if tensor.ndim == 4 else None))


def _unknown(name: str, model: str) -> WrongCheckpoint:
    return WrongCheckpoint(f"{name} is no tensor of {model}: only the built-in models can be converted")


# What only PyTorch has, and what only Flax has: a Sequential's layers, and the first layers of a ResNet.
_COUNT, _LAYERS, _STEM = "num_batches_tracked", "layers", "stem"


class _OfTorch(WeightNames):
    """They are the common ones but for BatchNorm's count of batches."""

    def to_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(_COUNT)}

    def from_common(self, tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
        """The count of batches starts at zero: only layers without a momentum read it, and these models have none."""
        means = [name for name in tensors if name.endswith("running_mean")]
        return {**tensors, **{name.replace("running_mean", _COUNT): np.array(0, dtype=np.int64) for name in means}}


def _without_containers(path: Path, model: str) -> Path:
    return [part for part in path if part not in (_LAYERS, _STEM)]


def _with_containers(path: Path, model: str) -> Path:
    """``["fc", "1"]`` is ``["fc", "layers", "1"]``: a number is one of a Sequential's layers."""
    inside = [part for name in path for part in ([_LAYERS, name] if name.isdecimal() else [name])]
    return [_STEM, *inside] if "resnet" in model and path[0].isdecimal() else inside


def _layers_within(path: Path, model: str) -> Path:
    """In Keras a block of a ResNet has other layers in it; everywhere else the dots belong to a layer's name."""
    return [".".join(path[:-1]), path[-1]] if path[0].startswith("resnet_block") else [".".join(path)]


_PLAIN = {"weight": "weight", "bias": "bias"}
_FLAX_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_KERAS_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
_MXNET_NORM = {"gamma": "weight", "beta": "bias", "running_mean": "running_mean", "running_var": "running_var"}

WEIGHT_NAMES: Mapping[str, WeightNames] = {
    "torch": _OfTorch(_PLAIN, _PLAIN),
    "jax": WeightNames(
        {"kernel": "weight", "bias": "bias"},
        _FLAX_NORM,
        channels_last=True,
        path_to_common=_without_containers,
        path_from_common=_with_containers,
    ),
    "tensorflow": WeightNames(
        {"kernel": "weight", "bias": "bias"},
        _KERAS_NORM,
        separator="/",
        channels_last=True,
        path_from_common=_layers_within,
    ),
    "mxnet": WeightNames(_PLAIN, _MXNET_NORM),
}
