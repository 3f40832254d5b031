"""What is looked at before a job begins: a few samples through the model say more than an error of a device later."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from manyhands.errors import BadLabels
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Supervised
from manyhands.training.torch.sources import Arrays, Batch, Samples, Source

_FEW = 2  # normalisation over a batch wants more than one
_OF_CLASSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
_IGNORED = -100  # the label that these losses leave out


def materialise(model: torch.nn.Module, data: Source) -> None:
    """Give lazy layers their shapes, by a few samples: they must be the same on every rank."""
    if not any(torch.nn.parameter.is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        return
    _answer(model, _few_samples(data))


def check_labels(model: torch.nn.Module, job: Job) -> None:
    """Labels that the model has no output for: on a GPU they would break the process, long after."""
    data = job.train
    if not (isinstance(data, Arrays) and isinstance(job.objective, Supervised) and len(data.tensors) == 2):
        return
    loss, labels = job.objective.loss, data.tensors[1]
    if not (loss in _OF_CLASSES or isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))):
        return
    labels = labels[labels != getattr(loss, "ignore_index", _IGNORED)]
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool or not len(labels):
        return
    try:
        scores = _answer(model, _few_samples(data))
    except Exception:  # the first step will say it, with all that belongs to it
        return
    if not isinstance(scores, torch.Tensor) or scores.dim() != 2:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= scores.shape[1]:
        raise BadLabels(
            f"labels go from {low} to {high}, but the model has {scores.shape[1]} outputs: they must be 0 to "
            f"{scores.shape[1] - 1}"
        )


def _few_samples(data: Source) -> Batch:
    if isinstance(data, Arrays):
        return data.take(torch.arange(min(_FEW, data.count), device=data.tensors[0].device))
    if isinstance(data, Samples):
        plain = dataclasses.replace(data, workers=0)
        (batch,) = plain.batches([np.arange(min(_FEW, data.count))], seed=0, pin=False, empty=False)
        assert batch is not None
        return batch
    return next(data.batches(0, 0))


@torch.no_grad()
def _answer(model: torch.nn.Module, batch: Batch) -> Any:
    """What the model answers, in evaluation mode: no statistics, no dropout."""
    first = next(model.parameters())
    numbers = [part for part in batch[:-1] if isinstance(part, torch.Tensor)]
    inputs = [part.to(first.device, first.dtype if part.is_floating_point() else None) for part in numbers]
    training = model.training
    model.eval()
    try:
        return model(*inputs)
    finally:
        model.train(training)
