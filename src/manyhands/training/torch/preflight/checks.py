"""Checks before a job begins. On one device they make no pass through the model or the loss.

There are two exceptions: lazy layers need a few samples to get their shapes, and on several devices, or with
``accumulate``, model and loss are tried once, on a copy (:mod:`.loss_trial`).

Labels that a model has no output for would break a GPU's process much later. The number of outputs is known after the
forward pass of the first step. Labels are looked at on the host, where it costs next to nothing: those of arrays all at
once, others batch by batch, before they go to the device. Until the number of outputs is known, their range is
recorded; then it is compared, before the loss sees the labels. Where the user has not chosen a loss, targets that are
neither classes nor probabilities are refused, and so is a model with one output: its cross-entropy is always 0.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadLabels, BadSettings
from manyhands.training import refusals
from manyhands.training.data.labels import ClassLabels
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, as_the_model
from manyhands.training.torch.data.sources import Arrays, Source
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import SEVERAL, Supervised
from manyhands.training.torch.state.module_state import evaluation_mode
from manyhands.training.torch.step.known_means import IGNORED, function_and_options, is_mean_of_classes
from manyhands.training.torch.step.logged import LIGHTNING

_HOOKS = (  # how Lightning's begin
    *("on_fit_", "on_train_", "on_validation_", "on_before_", "on_after_", "on_save_checkpoint", "on_load_checkpoint"),
    *("optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
)
_FEW = 2  # normalisation over a batch wants more than one
_CLOSE = 1e-2  # to 1: the sum of a sample's probabilities, in any precision
_ROWS = 4096  # whose sums are computed
_CURE = (
    "and the loss where none is given is cross_entropy, {}: give loss='mse' to predict numbers, or "
    "loss='bce_with_logits' for yes and no"
)


def check_is_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise refusals.not_a_model(model, "a torch.nn.Module")


def check_trainable(model: Any) -> None:
    check_is_module(model)
    # By name: a model may have a `parameters` of its own, which lists tensors that PyTorch does not know to be weights.
    if any(parameter.requires_grad for _, parameter in model.named_parameters()):
        return
    cure = "call requires_grad_(True) of a layer that has weights, and make weights of your own torch.nn.Parameter(...)"
    raise refusals.nothing_to_train(model, cure)


def note_sum(job: Job) -> None:
    """Say that a sum of losses is minimised as their mean: the only loss that is not taken as it is written."""
    if getattr(getattr(job.objective, "loss", None), "reduction", None) == "sum":
        job.notes.append(
            "the loss has reduction='sum': training minimises its mean over samples. To minimise the sum, multiply lr "
            "by the batch size"
        )


def check_hooks(model: torch.nn.Module) -> None:
    """Warn of Lightning's hooks in a model: the trainer calls its steps and ``configure_optimizers`` only."""
    if getattr(model, "automatic_optimization", True) is False:
        raise BadSettings(f"{type(model).__name__} has automatic_optimization=False: {SEVERAL}")
    own = [kind for kind in type(model).__mro__ if not kind.__module__.startswith(("torch.", *LIGHTNING))]
    if found := [name for kind in own for name in vars(kind) if name.startswith(_HOOKS)]:
        warnings.warn(
            f"{type(model).__name__}.{', '.join(found)}: the trainer calls no hooks of a model. A callback has the "
            "same moments: on_epoch_end, on_evaluation, on_model and others of mh.Callback",
            stacklevel=5,
        )


def is_lazy(model: torch.nn.Module) -> bool:
    return any(torch.nn.parameter.is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()])


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
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
    batch = data.few(_FEW)
    with torch.no_grad(), evaluation_mode(model):
        _call(copy_of(model), batch)  # if that fails, the layers stay as they are
        _call(model, batch)


def _call(model: torch.nn.Module, batch: Batch) -> None:
    if isinstance(batch, Mapping):
        dict_batches.output_of(model, as_the_model(model, batch))
    else:
        model(*as_the_model(model, [part for part in batch[:-1] if isinstance(part, torch.Tensor)]))


def check_gradient_hooks(model: torch.nn.Module) -> None:
    """Refuse hooks of parameters where a batch is processed in parts: they would see the gradients of these."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and compat.has_gradient_hooks(parameter):
            raise BadSettings(
                f"the parameter {name!r} has a hook, which would act on the gradient of each part of a batch. To clip, "
                "give Trainer(gradient_clip_val=...); else let the optimizer call it, which sees the gradient of the "
                "whole batch: optimizer.register_step_pre_hook(...)"
            )


# Labels


def check_labels(job: Job) -> None:
    """Check that the model has an output for every label, as soon as the number of outputs is known."""
    objective = job.objective
    if not (isinstance(objective, Supervised) and _of_classes(objective.loss)):
        return
    ignored = function_and_options(objective.loss)[1].get("ignore_index", IGNORED)
    labels = LabelRange(ClassLabels(ignored=ignored), is_default=objective.is_default)
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


@dataclass
class LabelRange:
    """Refuses labels that the model has no output for, and with the default loss targets that are no classes."""

    classes: ClassLabels
    is_default: bool  # the user has not chosen the loss

    def __call__(self, batch: Batch) -> None:
        """Look at the labels of a batch."""
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[-1], torch.Tensor):
            self.look(batch[-1])

    def look(self, labels: torch.Tensor) -> None:
        if self.is_default and labels.is_floating_point() and not _may_be_classes(labels[:_ROWS]):
            raise BadLabels(f"the targets are numbers, {_CURE.format('for class numbers or probabilities')}")
        if labels.dim() == 1 and not labels.is_floating_point() and labels.dtype != torch.bool:
            self.classes.look(labels.numpy(force=True))

    def learn(self, output: Any) -> None:
        """The first output: it has a column per class."""
        if isinstance(output, torch.Tensor):
            if self.is_default and output.dim() > 1 and output.shape[1] == 1:
                raise BadLabels(f"the model has one output, {_CURE.format('which takes one for each class')}")
            self.classes.learn(output.shape)


def _may_be_classes(labels: torch.Tensor) -> bool:
    """Whether floating-point targets may be class numbers, or probabilities of classes."""
    if labels.dim() == 1:
        return bool((labels == labels.round()).all())
    sums = labels.sum(1, dtype=torch.float32) if labels.dim() > 1 else labels
    return bool((labels >= 0).all() and ((sums - 1).abs() < _CLOSE).all())
