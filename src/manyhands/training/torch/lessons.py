"""What was wrong with the data of a job that failed: found by trying, and said only where it is proved.

PyTorch says what an operation would not take, not what the user gave. When a job has failed, its first samples go
through the model and the loss as they are; where that fails, too, they are changed in the ways in which data are wrong
most often, one change at a time and then several. The first with which it works is the lesson. For example samples of
float64 (NumPy's own) and labels of int32 for a model of float32::

    as they are                       fails
    samples as float32                fails
    labels as int64                   fails
    samples as float32, labels as int64   works: both are said
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from manyhands import tree
from manyhands.training.torch import randomness
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Supervised
from manyhands.training.torch.samples import can_be_read, few_samples
from manyhands.training.torch.sources import Batch, Samples

_FEW = 4
_Change = Callable[[Batch], Batch]


def of(job: Job) -> str | None:
    """What to change in the data so that the model can be trained with them; None where they are not to blame."""
    if not isinstance(job.objective, Supervised) or not can_be_read(job.train):
        return None
    try:
        return _of_batches(job) or _of_kinds(job)
    except Exception:  # nothing is to be learnt from that: the first error counts
        return None


def _of_batches(job: Job) -> str | None:
    """A list is a dataset: each of its entries is one sample. That of a loader's batches is not."""
    entries: Any = job.train.dataset if isinstance(job.train, Samples) else None
    if not isinstance(entries, (list, tuple)) or not isinstance(entries[0], (list, tuple)):
        return None
    if not _works(job, tuple(entries[0])) or _works(job, few_samples(job.train, 1)):
        return None
    return (
        f"the data are a list of {len(entries)} batches, and each entry of a list is taken for one sample: give the "
        "loader itself, or the arrays (X, y)"
    )


def _of_kinds(job: Job) -> str | None:
    """Samples or labels of a dtype or a shape that the model or the loss does not take."""
    batch = few_samples(job.train, _FEW)
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or _works(job, batch):
        return None
    changes = list(_changes(job, tuple(batch)))
    for count in range(1, len(changes) + 1):
        for some in itertools.combinations(changes, count):
            changed = tuple(batch)
            for _, change in some:
                changed = change(changed)
            if _works(job, changed):
                return "; ".join(words for words, _ in some)
    return None


def _changes(job: Job, batch: tuple[Any, ...]) -> Iterator[tuple[str, _Change]]:
    """What may be changed about these samples, and the words for it."""
    kind = next((p.dtype for p in job.model.parameters() if p.is_floating_point()), torch.float32)
    others = {leaf.dtype for leaf in tree.flatten(batch[:-1])[0] if isinstance(leaf, torch.Tensor)} - {kind}
    if others:
        shown = ", ".join(sorted(map(_named, others)))
        yield (
            f"the samples are {shown}, the model's weights {_named(kind)}: give X.to(torch.{_named(kind)})",
            lambda given: (*tree.map_leaves(lambda leaf: _as(leaf, kind), given[:-1]), given[-1]),
        )
    labels = batch[-1]
    if not isinstance(labels, torch.Tensor):
        return
    if labels.dtype != torch.int64:
        yield (
            f"the labels are {_named(labels.dtype)}, and numbers of classes must be int64: give y.long()",
            lambda given: (*given[:-1], given[-1].long()),
        )
    if labels.dtype != kind:
        yield (
            f"the targets are {_named(labels.dtype)}, what the model answers is {_named(kind)}: give "
            f"y.to(torch.{_named(kind)})",
            lambda given: (*given[:-1], given[-1].to(kind)),
        )
    if labels.dim() == 2 and labels.shape[1] == 1:
        yield (
            "the labels have a second axis of length 1: give y.squeeze(1)",
            lambda given: (*given[:-1], given[-1].squeeze(1)),
        )


def _as(leaf: Any, kind: torch.dtype) -> Any:
    return leaf.to(kind) if isinstance(leaf, torch.Tensor) else leaf


def _named(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _works(job: Job, batch: Batch) -> bool:
    """Whether a copy of the model makes a forward and a backward pass with these samples."""
    model = copy.deepcopy(job.model)
    device = next(model.parameters()).device
    batch = tree.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    try:
        with randomness.kept(device):
            job.objective(model, batch)[0].backward()
    except Exception:
        return False
    return True
