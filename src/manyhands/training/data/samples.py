"""Random-access sources, ``len(source)`` and ``source[i]``: of grain, of Hugging Face's datasets, of PyTorch's.

A sample is an array, a tuple or a dict. The samples of a batch are put together part by part, in the job's one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from manyhands import tree
from manyhands.errors import BadBatch
from manyhands.training.data.order import epoch_order


def is_random_access(data: Any) -> bool:
    """Whether ``data[i]`` is a sample. What can also be iterated is a loader of batches, unless it gives numbers."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, (Sequence, Mapping)):
        return False
    if hasattr(data, "shape") or not len(data):
        return False
    return not hasattr(data, "__iter__") or any(not np.ndim(leaf) for leaf in tree.flatten(data[0])[0])


class Samples:
    """The batches of a random-access source: a loader in the job's order of the epoch, or in that of the source."""

    def __init__(self, source: Any, batch_size: int) -> None:
        self._source, self._batch_size = source, batch_size
        self._epoch = 0
        self._seed: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def set_order(self, seed: int | None) -> None:
        """The order of this seed; None: that of the source."""
        self._seed = seed

    def __len__(self) -> int:
        return -(-len(self._source) // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = epoch_order(self._seed or 0, self._epoch, len(self._source), shuffle=self._seed is not None)
        for start in range(0, len(order), self._batch_size):
            yield _stacked([self._source[int(number)] for number in order[start : start + self._batch_size]])


def _stacked(samples: list[Any]) -> Any:
    leaves, structures = zip(*map(tree.flatten, samples), strict=True)
    if len(set(structures)) > 1:
        raise BadBatch("samples of the data have unlike parts: give every sample the same ones")
    try:
        return structures[0].unflatten([np.stack(parts) for parts in zip(*leaves, strict=True)])
    except ValueError as error:
        raise BadBatch(
            f"samples of the data have unlike shapes, and a batch is one array ({error}): pad them"
        ) from error
