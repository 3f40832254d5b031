"""What the built-in models share in all frameworks: widths, and names of weights.

The models are the same layer by layer, so names of weights differ by rule: in the last part (``kernel`` is ``weight``),
and in some frameworks in the path before it. Where kernels have their channels last, a convolution's is (height, width,
in, out) and a dense layer's (in, out); PyTorch's are (out, in, height, width) and (out, in), and these are the common
ones. NumPy only: weights can be converted where no framework is installed::

    torch        resnet_block2.0.conv3.weight
    jax          resnet_block2.layers.0.conv3.kernel
    tensorflow   resnet_block2.0/conv3/kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import WrongCheckpoint

RESNET18: dict[str, Any] = {"widths": (64, 128, 256, 512), "blocks": 2}
SMALL_RESNET: dict[str, Any] = {"widths": (16, 32, 64), "blocks": 1}


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
