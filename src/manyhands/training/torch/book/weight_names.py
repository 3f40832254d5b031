"""PyTorch's names of weights, and the common ones: they are the same but for BatchNorm's count of batches.

The names and layouts of PyTorch are those that all frameworks' weights are turned into on their way to another. NumPy
only: weights can be converted where the framework is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COUNT = "num_batches_tracked"


def to_common(tensors: Mapping[str, NDArray[Any]], model: str) -> dict[str, NDArray[Any]]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_COUNT)}


def from_common(tensors: Mapping[str, NDArray[Any]], model: str) -> dict[str, NDArray[Any]]:
    """The count of batches starts at zero: only layers without a momentum read it, and these models have none."""
    counts = {
        name.replace("running_mean", _COUNT): np.array(0, dtype=np.int64)
        for name in tensors
        if name.endswith("running_mean")
    }
    return {**tensors, **counts}
