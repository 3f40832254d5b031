"""Keras's names and layouts of weights, and the common ones, which are PyTorch's.

Layers have the same names in both (:mod:`.models` sees to it): ``resnet_block2.0/conv3/kernel`` is
``resnet_block2.0.conv3.weight``. Keras keeps a convolution's kernel as (height, width, in, out) and a dense layer's as
(in, out); PyTorch as (out, in, height, width) and (out, in). NumPy only: weights can be converted where the framework
is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

_COMMON = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def to_common(tensors: Mapping[str, NDArray[Any]], model: str) -> dict[str, NDArray[Any]]:
    common = {}
    for name, tensor in tensors.items():
        *path, last = name.split("/")
        common[".".join([*path, _COMMON[last]])] = _turned(tensor, (3, 2, 0, 1))
    return common


def from_common(tensors: Mapping[str, NDArray[Any]], model: str) -> dict[str, NDArray[Any]]:
    own = {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        normalises = f"{layer}.running_mean" in tensors
        own[f"{_path(layer)}/{_own(last, normalises=normalises)}"] = _turned(tensor, (2, 3, 1, 0))
    return own


def _turned(tensor: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    """A kernel with its axes in the other order; a vector as it is."""
    return tensor.transpose(axes if tensor.ndim == 4 else None) if tensor.ndim > 1 else tensor


def _path(layer: str) -> str:
    """A block of a ResNet is one layer, which has others in it."""
    head, _, last = layer.rpartition(".")
    return f"{head}/{last}" if head.startswith("resnet_block") else layer


def _own(last: str, *, normalises: bool) -> str:
    twins = [own for own, common in _COMMON.items() if common == last]
    return twins[-1] if normalises else twins[0]
