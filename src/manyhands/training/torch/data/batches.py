"""A batch as the user's loader gives it: usually a tuple of tensors, also a dict or a dataclass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from manyhands import tree
from manyhands.amounts import counted
from manyhands.errors import BadBatch

Batch = Any


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in tree.flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The tree with ``function`` applied to its tensors; other leaves stay as they are."""
    return tree.map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)


def rows(batch: Batch) -> int:
    """The number of samples in a batch."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise BadBatch(
        "there is no tensor with samples in the batch that the loader gave: a batch is a tensor, or a tuple or dict of "
        "them, with one row per sample"
    )


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Samples ``start`` to ``stop``: the rows of tensors, and the entries of lists without tensors (names, say)."""
    size = rows(batch)
    return batch if (start, stop) == (0, size) else _cut(batch, size, slice(start, stop))


def pick(batch: Batch, numbers: list[int]) -> Batch:
    """The samples of the batch with these numbers."""
    return _cut(batch, rows(batch), numbers)


def _cut(part: Any, size: int, where: slice | list[int]) -> Any:
    if isinstance(part, PackedSequence):
        raise BadBatch("a PackedSequence cannot be cut into shards: give padded tensors, and pack them in the model")
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return _cut_rows(part, size, where)
    if isinstance(part, (list, tuple)):
        if type(part) in (list, tuple) and len(part) == size and not _has_tensors(part):
            return part[where] if isinstance(where, slice) else type(part)(part[number] for number in where)
        parts = [_cut(entry, size, where) for entry in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    changed: Any = copy.copy(part)
    if isinstance(part, dict):
        changed.update({key: _cut(value, size, where) for key, value in part.items()})
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            object.__setattr__(changed, field.name, _cut(getattr(part, field.name), size, where))
    else:
        return part
    return changed


def _cut_rows(part: Any, size: int, where: slice | list[int]) -> Any:
    if part.ndim and part.shape[0] != size:
        raise BadBatch(
            f"the batch has {counted(size, 'sample')}, and one of its tensors has the shape {tuple(part.shape)}: to "
            "be cut into shards, every tensor must be batch-first, with one row per sample"
        )
    return part[where] if part.ndim else part


def _has_tensors(part: Any) -> bool:
    return any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in tree.flatten(part)[0])
