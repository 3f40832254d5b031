"""What a step minimises: from a model and a batch to a loss, and to the number of right answers where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mxnet import gluon

from manyhands.errors import BadBatch
from manyhands.training.mxnet.book import Module
from manyhands.training.mxnet.figures import right_answers

Batch = Sequence[Any]


@dataclass
class Objective:
    """The loss of a model's answer, or the model's own ``training_step``.

    ``loss(answer, target)`` gives one number per sample, as Gluon's losses do, or their mean.
    """

    model: Any
    loss: Callable[[Any, Any], Any] | None

    def __call__(self, batch: Batch, *, training: bool) -> tuple[Any, Any | None]:
        """The sum of the losses of the batch's samples, and how many were answered rightly."""
        size = len(batch[0])
        if self.loss is None:
            own = self.model.training_step if training else getattr(self.model, "validation_step", None)
            return total(own(batch) if own else self.model.training_step(batch), size), None
        answer = self.model(*batch[:-1])
        return total(self.loss(answer, batch[-1]), size), right_answers(answer, batch[-1], anyhow=self.of_classes)

    @property
    def of_classes(self) -> bool:
        """Whether targets are numbers of classes for certain: Gluon's may be floating-point numbers, too."""
        softmax = gluon.loss.SoftmaxCrossEntropyLoss
        return isinstance(self.loss, softmax) and self.loss._sparse_label and self.loss._axis in (-1, 1)


def objective_for(model: Any, loss: Callable[[Any, Any], Any] | None) -> Objective:
    if loss is None and hasattr(model, "training_step"):
        if not isinstance(model, Module) or type(model).training_step is not Module.training_step:
            return Objective(model, None)
        return Objective(model, model.loss)  # the same step, but with the answers at hand
    return Objective(model, loss or gluon.loss.SoftmaxCrossEntropyLoss())


def total(value: Any, size: int) -> Any:
    """The sum over the samples; one number is their mean (MXNet's older arrays have no scalars, but a length of 1)."""
    if math.prod(value.shape) == 1:
        return value.reshape((1,)).sum() * size
    if value.shape[0] != size:
        raise BadBatch(
            f"the loss of {size} samples has the shape {tuple(value.shape)}: give one number per sample, or their mean"
        )
    return value.sum()
