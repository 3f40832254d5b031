"""Weights of the built-in models between Flax's names and memory and PyTorch's, which all frameworks can convert to.

The models are the same layer by layer (:mod:`.models`), so names differ by rule:
``resnet_block2.layers.0.conv3.kernel`` here is ``resnet_block2.0.conv3.weight`` there. A convolution's kernel is
(height, width, in, out) here and (out, in, height, width) there; a linear one (in, out) here and (out, in) there. Only
NumPy is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import WrongCheckpoint
from manyhands.training.commands.recipes import MODELS

Tensors = dict[str, NDArray[Any]]

_TO_COMMON = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_FROM_COMMON = {"bias": "bias", "running_mean": "mean", "running_var": "var"}
# Parts of the names that only Flax has: what holds a Sequential's layers, and the first layers of a ResNet.
_LAYERS, _STEM = "layers", "stem"


def to_common(tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
    """A model's tensors under PyTorch's names, laid out as PyTorch does."""
    _check(model)
    found = {}
    for name, tensor in tensors.items():
        *path, kind = name.split(".")
        if kind not in _TO_COMMON:
            raise WrongCheckpoint(f"{name} is no tensor of {model}: only the built-in models can be converted")
        plain = [part for part in path if part not in (_LAYERS, _STEM)]
        laid = _transposed(tensor, (3, 2, 0, 1)) if kind == "kernel" else tensor
        found[".".join([*plain, _TO_COMMON[kind]])] = np.ascontiguousarray(laid)
    return found


def from_common(tensors: Mapping[str, NDArray[Any]], model: str) -> Tensors:
    """A model's tensors under Flax's names, laid out as Flax does, of PyTorch's."""
    _check(model)
    found = {}
    for name, tensor in tensors.items():
        *path, kind = name.split(".")
        if kind == "num_batches_tracked":
            continue
        if kind == "weight":
            own = "scale" if tensor.ndim == 1 else "kernel"
        elif kind in _FROM_COMMON:
            own = _FROM_COMMON[kind]
        else:
            raise WrongCheckpoint(f"{name} is no tensor of {model}: only the built-in models can be converted")
        laid = _transposed(tensor, (2, 3, 1, 0)) if own == "kernel" else tensor
        found[".".join([*_own_path(path, model), own])] = np.ascontiguousarray(laid)
    return found


def _own_path(path: list[str], model: str) -> list[str]:
    """``["fc", "1"]`` is ``["fc", "layers", "1"]``: a number is one of a Sequential's layers."""
    inside = [part for one in path for part in ([_LAYERS, one] if one.isdecimal() else [one])]
    return [_STEM, *inside] if "resnet" in model and path[0].isdecimal() else inside


def _transposed(tensor: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    return tensor.transpose(axes) if tensor.ndim == 4 else tensor.T


def _check(model: str) -> None:
    if model not in MODELS:
        raise WrongCheckpoint(f"{model!r} is not one of {', '.join(MODELS)}: only these can be converted")
