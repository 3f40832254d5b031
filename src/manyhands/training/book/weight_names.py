"""Weights of the built-in models, between a framework's names and layouts and the common ones, which are PyTorch's.

The models are the same layer by layer, so names differ by rule: in the last part (``kernel`` is ``weight``), and in
some frameworks in the path before it. Where kernels have their channels last, a convolution's is (height, width, in,
out) and a dense layer's (in, out); PyTorch's are (out, in, height, width) and (out, in). NumPy only: weights can be
converted where the framework is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import WrongCheckpoint

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
