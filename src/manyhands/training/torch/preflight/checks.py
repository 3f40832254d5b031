"""What is looked at before a job begins. On one device no pass is made for it through the model or the loss.

There are two exceptions: lazy layers need a few samples to get their shapes, and on several devices, or with
``accumulate``, a loss that we cannot look into is tried once, on a copy (:mod:`manyhands.training.loss_trial`).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from manyhands.training.torch.data.samples import as_the_model, few_samples
from manyhands.training.torch.data.sources import Arrays, Source
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Supervised
from manyhands.training.torch.preflight import loss_trial
from manyhands.training.torch.preflight.label_range import LabelRange
from manyhands.training.torch.step.known_means import IGNORED, function_and_options, is_mean_of_classes

_FEW = 2  # normalisation over a batch wants more than one


def is_lazy(model: torch.nn.Module) -> bool:
    return any(torch.nn.parameter.is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()])


def materialise(model: torch.nn.Module, data: Source) -> None:
    """Give lazy layers their shapes, by a few samples: they must be the same on every rank."""
    if not is_lazy(model):
        return
    numbers = [part for part in few_samples(data, _FEW)[:-1] if isinstance(part, torch.Tensor)]
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()  # no statistics, no dropout
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*as_the_model(model, numbers))  # if that fails, the layers stay as they are
            model(*as_the_model(model, numbers))
    finally:
        for layer, training in modes:
            layer.training = training


def check_labels(job: Job) -> None:
    """Have labels looked at that the model may have no output for."""
    objective = job.objective
    if not (isinstance(objective, Supervised) and _of_classes(objective.loss)):
        return
    labels = LabelRange(function_and_options(objective.loss)[1].get("ignore_index", IGNORED))
    job.train = _looked_at(job.train, labels)
    job.test = None if job.test is None else _looked_at(job.test, labels)
    job.objective = dataclasses.replace(objective, labels=labels)


def _looked_at(data: Source, labels: LabelRange) -> Source:
    if not isinstance(data, Arrays):
        return dataclasses.replace(data, look=labels)
    if len(data.tensors) > 1:
        labels.look(data.tensors[-1])
    return data


def _of_classes(loss: Any) -> bool:
    return is_mean_of_classes(loss) or isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))


_MEAN_OF_SUM = (
    "the loss has reduction='sum': training minimises its mean over samples, so that the step does not depend on the "
    "batch size. For the steps of the sum, multiply lr by the batch size"
)


def check_loss(model: torch.nn.Module, job: Job, ranks: int) -> None:
    """Find out how the parts of a batch are put together, where it is processed in parts; refuse what cannot be.

    PyTorch's means over classes are known: with class weights, or labels that are left out, they come as sums and
    counts. Other losses are tried.
    """
    objective = job.objective
    if getattr(getattr(objective, "loss", None), "reduction", None) == "sum":
        job.notes.append(_MEAN_OF_SUM)
    if isinstance(objective, Supervised) and is_mean_of_classes(objective.loss):
        objective.sums = any(_weighs(objective.loss, data) for data in (job.train, job.test) if data is not None)
    elif ranks > 1 or job.settings.step.accumulate > 1:
        objective.sums, note = loss_trial.sums(model, job)
        job.notes += [note] if note is not None else []


def _weighs(loss: Any, data: Source) -> bool:
    """Whether labels may weigh differently in a mean over classes; labels that come later may."""
    options = function_and_options(loss)[1]
    if options.get("weight") is not None or not isinstance(data, Arrays):
        return True
    labels = data.tensors[-1]
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return bool((labels == options.get("ignore_index", IGNORED)).any())
