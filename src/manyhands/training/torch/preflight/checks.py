"""Checks before a job begins. On one device they make no pass through the model or the loss.

There are two exceptions: lazy layers need a few samples to get their shapes, and on several devices, or with
``accumulate``, model and loss are tried once, on a copy (:mod:`manyhands.training.loss.loss_trial`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.errors import BadSettings, type_in_words
from manyhands.training import refusals
from manyhands.training.data.labels import why_no_classes
from manyhands.training.loss import own_step
from manyhands.training.loss.own_step import step_name
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch
from manyhands.training.torch.data.samples import as_the_model, few_samples, first_batches
from manyhands.training.torch.data.sources import Arrays, Source, Stream
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Objective, OwnStep, Supervised, makes_updates
from manyhands.training.torch.preflight import loss_trial
from manyhands.training.torch.preflight.label_range import LabelRange
from manyhands.training.torch.ranks.whole_batch import Rows
from manyhands.training.torch.state.module_state import evaluating
from manyhands.training.torch.step.known_means import IGNORED, function_and_options, is_mean_of_classes

_HOST = torch.device("cpu")
_FEW = 2  # normalisation over a batch wants more than one


def check_is_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise refusals.not_a_model(model, "a torch.nn.Module")


def check_trainable(model: Any) -> None:
    check_is_module(model)
    # By name: a model may have a `parameters` of its own, which lists tensors that PyTorch does not know to be weights.
    if any(parameter.requires_grad for _, parameter in model.named_parameters()):
        return
    plain = [name for name, value in vars(model).items() if isinstance(value, torch.Tensor) and value.requires_grad]
    if not plain:
        raise BadSettings(
            f"{type_in_words(model)} has no parameters that could be trained: call requires_grad_(True) of a layer "
            "that has weights"
        )
    raise BadSettings(
        f"{type_in_words(model)} has no parameters that could be trained: its tensors {', '.join(plain)} are not known "
        f"to PyTorch as weights, so no device and no checkpoint gets them. Write self.{plain[0]} = "
        "torch.nn.Parameter(...)"
    )


def is_lazy(model: torch.nn.Module) -> bool:
    return any(torch.nn.parameter.is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()])


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model that may have lazy layers."""
    return copy.deepcopy(model, lazy_buffers(model))


def lazy_buffers(model: torch.nn.Module) -> dict[int, Any]:
    """Copies of the buffers that have no shape yet, for ``copy.deepcopy``: PyTorch copies such parameters only."""
    kind: Any = torch.nn.UninitializedBuffer
    lazy = [buffer for buffer in model.buffers() if isinstance(buffer, kind)]
    return {id(each): kind(device=each.device, dtype=each.dtype) for each in lazy}


def materialise(model: torch.nn.Module, data: Source) -> None:
    """Give lazy layers their shapes, by a few samples: they must be the same on every rank."""
    if not is_lazy(model):
        return
    batch = few_samples(data, _FEW)
    with torch.no_grad(), evaluating(model):
        _call(copied(model), batch)  # if that fails, the layers stay as they are
        _call(model, batch)


def _call(model: torch.nn.Module, batch: Batch) -> None:
    if isinstance(batch, Mapping):
        dict_batches.output_of(model, as_the_model(model, batch))
    else:
        model(*as_the_model(model, [part for part in batch[:-1] if isinstance(part, torch.Tensor)]))


def why_no_accuracy(objective: Objective, model: torch.nn.Module, data: Source, *, training: bool) -> str | None:
    """Why there will be no accuracy, if a sample or the model's own step shows it; None: there may be one."""
    if isinstance(objective, OwnStep):
        name = step_name(model, training=training)
        if not own_step.is_default(model, name):
            return own_step.why_no_accuracy(model, training=training)
    if isinstance(data, Stream):
        return None
    batch = few_samples(data, 1)
    if isinstance(batch, Mapping):
        target = batch.get("labels")
    else:
        target = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if not isinstance(target, torch.Tensor):
        return None
    return why_no_classes(str(target.dtype).removeprefix("torch."), (data.count, *target.shape[1:]))


def check_labels(job: Job) -> None:
    """Check that the model has an output for every label, as soon as the number of outputs is known."""
    objective = job.objective
    if not (isinstance(objective, Supervised) and _of_classes(objective.loss)):
        return
    ignored = function_and_options(objective.loss)[1].get("ignore_index", IGNORED)
    labels = LabelRange(ignored, is_default=objective.is_default)
    job.train = _looked_at(job.train, labels)
    job.test = None if job.test is None else _looked_at(job.test, labels)
    job.objective = dataclasses.replace(objective, labels=labels)


def _looked_at(data: Source, labels: LabelRange) -> Source:
    if not isinstance(data, Arrays):
        return dataclasses.replace(data, look=labels)
    if len(data.tensors) > 1 and not isinstance(data.prepare, dict_batches.Named):
        labels.look(data.tensors[-1])
    return data


def _of_classes(loss: Any) -> bool:
    return is_mean_of_classes(loss) or isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))


_MEAN_OF_SUM = (
    "the loss has reduction='sum': training minimises its mean over samples, so the step does not depend on the "
    "batch size. To minimise the sum, multiply lr by the batch size"
)


_OF_UPDATES = (
    "training_step(batch, optimizers): several devices make the update of one if each loss is a mean over samples or "
    "an mh.LossSum, which the trainer cannot try out here"
)


def check_loss(model: torch.nn.Module, job: Job, ranks: int, device: torch.device = _HOST) -> list[str]:
    """Find out how the parts of a batch are put together, where it is processed in parts; refuse what cannot be.

    PyTorch's means over classes come as sums and counts where class weights, or labels that are left out, ask for it.
    The model is tried on ``device``. The result are warnings.
    """
    objective, parts = job.objective, ranks > 1 or job.settings.step.accumulate > 1
    if isinstance(objective, OwnStep) and makes_updates(model):  # to try a loss would be to train
        job.notes += [_OF_UPDATES] if parts else []
        objective.rows = Rows() if parts else None
        return []
    if getattr(getattr(objective, "loss", None), "reduction", None) == "sum":
        job.notes.append(_MEAN_OF_SUM)
    if isinstance(objective, Supervised) and is_mean_of_classes(objective.loss) and not _loss_of_model(job, parts):
        objective.sums = any(_weighs(objective.loss, data) for data in (job.train, job.test) if data is not None)
    if not parts:
        return []
    answer = loss_trial.try_parts(model, job, ranks=ranks, device=device)
    objective.sums, objective.rows = answer.sums, answer.rows
    job.notes += answer.notes
    return answer.warnings


def _loss_of_model(job: Job, parts: bool) -> bool:
    """Whether batches are dicts, so that the loss is the one in the model's output; checked only if it matters."""
    data = job.train
    if isinstance(data, Arrays):
        return isinstance(data.prepare, dict_batches.Named)
    if not parts or not getattr(job.objective, "is_default", False):
        return False
    first = next(first_batches(job)) if isinstance(data, Stream) else few_samples(data, 1)
    return isinstance(first, Mapping)


def _weighs(loss: Any, data: Source) -> bool:
    """Whether labels may weigh differently in a mean over classes; labels that come later may."""
    options = function_and_options(loss)[1]
    if options.get("weight") is not None or not isinstance(data, Arrays):
        return True
    labels = data.tensors[-1]
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return bool((labels == options.get("ignore_index", IGNORED)).any())
