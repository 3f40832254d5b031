"""NumPy arrays by name as safetensors: for frameworks whose tensors convert to NumPy without loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from manyhands.errors import CheckpointDamaged, WrongCheckpoint

_NAMED = 5  # differences that an error lists


def pack(tensors: Mapping[str, Any]) -> bytes:
    """Tensors as bytes. Kinds of numbers that NumPy does not know (bfloat16) become float32, which holds them all."""
    return save({name: np.asarray(_plain(np.asarray(tensor)), order="C") for name, tensor in tensors.items()})


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def unpack(blob: bytes) -> dict[str, NDArray[Any]]:
    try:
        return load(blob)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointDamaged(f"a file of the checkpoint holds no tensors that can be read: {error}") from error


def arrays_for(blob: bytes, expected: Mapping[str, Any], contents: str) -> dict[str, NDArray[Any]]:
    """The saved tensors, if they have the expected names and shapes; each in the expected dtype."""
    saved = unpack(blob)
    refuse_others(saved, expected, contents)
    return {name: saved[name].astype(tensor.dtype) for name, tensor in expected.items()}


def refuse_others(saved: Mapping[str, Any], expected: Mapping[str, Any], contents: str) -> None:
    """Refuse tensors of other names or shapes than expected, with the differences named."""
    differences = [f"{name} is missing" for name in expected.keys() - saved.keys()]
    differences += [f"{name} is unknown here" for name in saved.keys() - expected.keys()]
    differences += [
        f"{name} is {tuple(saved[name].shape)}, here it is {tuple(expected[name].shape)}"
        for name in expected.keys() & saved.keys()
        if tuple(saved[name].shape) != tuple(expected[name].shape)
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:_NAMED]) + ("; ..." if len(differences) > _NAMED else "")
        raise WrongCheckpoint(f"these are {contents}: {shown}")
