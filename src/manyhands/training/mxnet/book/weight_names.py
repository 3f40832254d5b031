"""The weights of the built-in models, between MXNet's names and PyTorch's.

Both keep convolutions as (out, in, rows, columns) and dense layers as (out, in), and the layers have the same names,
so that only batch normalisation differs: MXNet says gamma and beta where PyTorch says weight and bias::

    resnet_block2.0.bn1.gamma   is   resnet_block2.0.bn1.weight
    resnet_block2.0.conv3.weight     is the same in both
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

_OURS = {"gamma": "weight", "beta": "bias"}
_COMMON = {common: ours for ours, common in _OURS.items()}


def to_common(tensors: Mapping[str, NDArray[Any]], model: str) -> dict[str, NDArray[Any]]:
    """What a checkpoint of MXNet holds, as PyTorch's ``state_dict`` has it (without ``num_batches_tracked``)."""
    return {_renamed(name, _OURS): array for name, array in tensors.items()}


def from_common(tensors: Mapping[str, NDArray[Any]], model: str) -> dict[str, NDArray[Any]]:
    """The other way round."""
    normalised = {name.rpartition(".")[0] for name in tensors if name.endswith(".running_mean")}
    return {
        _renamed(name, _COMMON) if name.rpartition(".")[0] in normalised else name: array
        for name, array in tensors.items()
    }


def _renamed(name: str, words: Mapping[str, str]) -> str:
    layer, _, last = name.rpartition(".")
    return f"{layer}.{words.get(last, last)}"
