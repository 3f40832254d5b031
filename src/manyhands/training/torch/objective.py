"""What a step minimises: from a model and a batch to a loss, and to the number of right answers where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from manyhands.training.torch.book import Module
from manyhands.training.torch.sources import Batch


class Objective(Protocol):
    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss as a mean over the samples of the batch, and how many were answered rightly."""


@dataclass
class Supervised:
    """A loss of the model's answer and the last part of the batch: ``loss(model(*inputs), target)``."""

    loss: Callable[[Any, Any], torch.Tensor]

    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        *inputs, target = batch
        answer = model(*inputs)
        return mean_loss(self.loss, self.loss(answer, target), target), right_answers(answer, target)


@dataclass
class OwnStep:
    """A model that says itself what a step is: ``training_step(batch)`` gives the mean loss."""

    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        own: Any = model
        if isinstance(model, Module) and type(model).training_step is Module.training_step:
            answer = own(*batch[:-1])  # the same step, but with the answers at hand
            return own.loss(answer, batch[-1]), right_answers(answer, batch[-1])
        step = own.training_step if model.training else getattr(own, "validation_step", own.training_step)
        return step(batch), None


def mean_loss(loss: Any, value: torch.Tensor, target: Any) -> torch.Tensor:
    """The mean over samples, whatever reduction the loss has."""
    if value.dim():
        return value.flatten(1).sum(1).mean() if value.dim() > 1 else value.mean()
    if getattr(loss, "reduction", "mean") == "sum":
        return value / max(1, len(target))
    return value


def right_answers(answer: Any, target: Any) -> torch.Tensor | None:
    """How many rows of class scores have their largest at the target; None where that has no meaning."""
    if not (isinstance(answer, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if answer.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    return (answer.detach().argmax(1) == target).sum()


def objective_for(model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> Objective:
    if loss is None and hasattr(model, "training_step"):
        return OwnStep()
    return Supervised(loss or torch.nn.functional.cross_entropy)
