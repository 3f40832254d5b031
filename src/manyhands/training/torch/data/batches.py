"""A batch as the user's loader gives it: usually a tuple of tensors, also a dict or a dataclass.

Only a loader's batches are cut, and only these need one row per sample. Samples of a data set are collated part by
part, whatever the collate function makes of them: sequences with time first, graphs one after the other, a mask.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from manyhands import tree
from manyhands.amounts import count_of
from manyhands.errors import BadBatch

Batch = Any
_DATASET = (
    "give a Dataset with a collate function: each device, and each micro-batch, is then collated from its own samples"
)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's samples of a batch, in the micro-batches that it processes one after the other."""

    parts: tuple[Batch, ...]
    sizes: tuple[int, ...]  # the samples in each of them
    of_ranks: tuple[int, ...] = ()  # the samples that each rank has of the batch

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def whole(self) -> Batch:
        """All samples, of a shard that is one micro-batch."""
        (part,) = self.parts
        return part


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in tree.flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The tree with ``function`` applied to its tensors; other leaves stay as they are."""
    return tree.map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)


def as_the_model(model: torch.nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device, with floating-point numbers in the model's dtype."""
    first = next(model.parameters())
    return map_tensors(lambda leaf: leaf.to(first.device, first.dtype if leaf.is_floating_point() else None), batch)


def rows(batch: Batch) -> int:
    """The number of samples in a batch that may be cut."""
    if (count := rows_or_none(batch)) is not None:
        return count
    raise BadBatch(
        "there is no tensor with samples in the batch that the loader gave: to be cut into shards, a batch is a tensor "
        f"or a tuple or dict of them, with one row per sample. Or {_DATASET}"
    )


def rows_or_none(batch: Batch) -> int | None:
    """The rows of the first tensor; None without any."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), None)


def check_asked(batch: Batch, asked: int) -> None:
    """Refuse a collated part of a batch that has tensors, none of which has so many samples on its first two axes."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()]
    if shapes and not any(asked in shape[:2] for shape in shapes):
        raise BadBatch(
            f"the trainer asked for {count_of(asked, 'sample')}, and the collate function made tensors of the shapes "
            f"{', '.join(map(str, shapes))}: leave samples out in the dataset, not in the collate function"
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
        raise BadBatch(f"a PackedSequence cannot be cut into shards: pack sequences in the model, or {_DATASET}")
    if isinstance(part, (torch.Tensor, np.ndarray)):
        if part.ndim and part.shape[0] != size:
            raise BadBatch(
                f"the batch has {count_of(size, 'sample')}, and one of its tensors has the shape {tuple(part.shape)}: "
                f"to be cut into shards, every tensor must be batch-first, with one row per sample. Or {_DATASET}"
            )
        return part[where] if part.ndim else part
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


def _has_tensors(part: Any) -> bool:
    return any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in tree.flatten(part)[0])
