"""What a step minimises: the loss of a model and a batch, and the number of correct predictions of classes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from manyhands.amounts import count_of
from manyhands.backends.mxnet.parallel import blocks_of
from manyhands.errors import BadBatch, BadSettings, ManyhandsError, type_in_words
from manyhands.training import refusals
from manyhands.training.data.labels import ClassLabels
from manyhands.training.loss.own_step import LossSum, call_step, is_default, step_name
from manyhands.training.mxnet import replicas

Batch = Sequence[Any]
# Losses that compare each number of the output with one of the target.
_PAIRING = (gluon.loss.L2Loss, gluon.loss.L1Loss, gluon.loss.HuberLoss, gluon.loss.SigmoidBinaryCrossEntropyLoss)


@dataclass(frozen=True)
class Loss:
    """The loss of a batch or of a part of it, as arrays of one number on its device.

    ``total`` is the sum over the samples, or the total of the user's :class:`LossSum`; then ``count`` is its count, and
    all totals of the batch are divided by all counts. ``correct``: the correct predictions.
    """

    total: Any
    count: Any | None = None
    correct: Any | None = None
    output: Any | None = None  # the model's, where the objective knows it


@dataclass
class Objective:
    """The loss of a model's output, or the model's own ``training_step``.

    ``loss(output, target)`` gives one number per sample, as Gluon's losses do, their mean, or a :class:`LossSum`.
    """

    model: Any
    loss: Callable[[Any, Any], Any] | None
    labels: ClassLabels | None = None  # learns from the first output how many classes there are

    def __call__(self, batch: Batch, *, training: bool) -> Loss:
        size = len(batch[0])
        if self.loss is None:
            name = step_name(self.model, training=training)
            value, accuracy = call_step(self.model, name, batch)
            correct = (accuracy * size).round() if isinstance(accuracy, mx.nd.NDArray) else None
            return _loss(value, size, f"{name} of {type(self.model).__name__}", correct)
        if len(batch) < 2:
            raise refusals.no_target(batch)
        inputs, target = batch[:-1], batch[-1]
        output = checked_output(self.model, inputs)
        if self.labels is not None and isinstance(output, mx.nd.NDArray):
            self.labels.learn(output.shape)
        if isinstance(self.loss, gluon.loss.Loss) and not isinstance(output, mx.nd.NDArray):
            raise BadBatch(
                f"the model answers with {type_in_words(output)}, and {type(self.loss).__name__} takes one array: "
                "give loss=lambda output, target: ..., which chooses what is compared with the target"
            )
        try:
            value = self.loss(output, target)
        except mx.MXNetError as error:
            if not (isinstance(self.loss, gluon.loss.Loss) and isinstance(target, mx.nd.NDArray)):
                raise
            if isinstance(self.loss, _PAIRING) and math.prod(output.shape) != math.prod(target.shape):
                raise refusals.unlike_target(output.shape, target.shape) from error
            shapes = f"outputs of shape {output.shape} with targets of shape {target.shape}"
            raise BadBatch(f"{type(self.loss).__name__} cannot compare {shapes}: {_reason(error)}") from error
        correct = count_correct(output, target, are_classes=self.of_classes)
        return replace(_loss(value, size, "the loss", correct), output=output)

    @property
    def of_classes(self) -> bool:
        """Whether targets are numbers of classes for certain: Gluon's may be floating-point numbers, too."""
        softmax = gluon.loss.SoftmaxCrossEntropyLoss
        return isinstance(self.loss, softmax) and self.loss._sparse_label and self.loss._axis in (-1, 1)

    @property
    def is_gluons(self) -> bool:
        """Whether the loss is one of Gluon's own, with one number per sample: its parts add up."""
        if isinstance(self.loss, gluon.loss.SDMLLoss):  # it compares each sample with the others of its batch
            return False
        return type(self.loss).__module__ == gluon.loss.__name__ and getattr(self.loss, "_batch_axis", 0) == 0


def checked_output(model: Any, inputs: Batch) -> Any:
    """The model's output. If it does not take such inputs, the error describes the user's data."""
    try:
        return model(*inputs)
    except (mx.MXNetError, ValueError) as error:
        if isinstance(error, ManyhandsError):
            raise
        refusal = refusals.not_taken(model, [part.shape[1:] for part in inputs], ValueError(_reason(error)))
        raise BadBatch(f"{refusal}{_cure(model, inputs)}") from error
    except TypeError as error:
        if len(inputs) > 1 and "positional argument" in str(error):
            error.add_note(
                f"A batch has {len(inputs) + 1} parts, and all but the last go to the model. Weights of samples need a "
                "training_step(batch) that returns mh.LossSum(total, count)."
            )
        raise


def _cure(model: Any, inputs: Batch) -> str:
    kind = np.dtype(inputs[0].dtype).name
    if "float" not in kind:
        return f". If these {kind} are not numbers of words, give floating-point numbers, X.astype('float32')"
    convolutions = any(isinstance(layer, gluon.nn.Conv2D) for layer in blocks_of(model))
    if convolutions and len(inputs[0].shape) == 3:
        return ". A convolution takes images with an axis of channels: give X[:, np.newaxis]"
    return ""


def objective_for(model: Any, loss: Callable[[Any, Any], Any] | None) -> Objective:
    if loss is None and hasattr(model, "training_step"):
        if not is_default(model, "training_step"):
            return Objective(model, None)
        return Objective(model, model.loss)  # the same step, but with the outputs at hand
    return Objective(model, loss or gluon.loss.SoftmaxCrossEntropyLoss())


def _loss(value: Any, size: int, name: str, correct: Any | None = None) -> Loss:
    """The value that the user's code returned for ``size`` samples. MXNet's older arrays have length 1, not scalars."""
    if isinstance(value, LossSum):
        total, count = value.total, value.count
        if not _is_scalar(total) or not (_is_scalar(count) or isinstance(count, numbers.Real)):
            raise BadBatch(
                f"{name} returned a LossSum of {refusals.in_words(total)} and {refusals.in_words(count)}: total "
                "has to be an array of one number, count too, or a plain number"
            )
        with autograd.pause():
            if not isinstance(count, mx.nd.NDArray):
                count = mx.nd.full((1,), float(count), ctx=total.ctx, dtype="float64")
            count = count.detach().reshape((1,)).astype("float64")
        return Loss(total.reshape((1,)), count, correct)
    if not isinstance(value, mx.nd.NDArray):
        raise refusals.not_a_loss(name, value)
    if _is_scalar(value):
        return Loss(value.reshape((1,)).sum() * size, None, correct)
    if value.shape[0] != size:
        shape = f"the loss of {count_of(size, 'sample')} has the shape {tuple(value.shape)}"
        raise BadBatch(f"{shape}: give one number per sample, or their mean")
    return Loss(value.sum(), None, correct)


def check_same_kind(losses: Sequence[Loss]) -> bool:
    """Whether the parts of a batch are sums with counts; all of them have to be, or none."""
    kinds = {loss.count is not None for loss in losses}
    if len(kinds) > 1:
        raise BadSettings("the loss is a LossSum for some parts of a batch only: return a LossSum for each")
    return True in kinds


def _is_scalar(value: Any) -> bool:
    return isinstance(value, mx.nd.NDArray) and math.prod(value.shape) == 1


def _reason(error: Exception) -> str:
    """The last line of MXNet's error: those above are of its C++ code."""
    return str(error).strip().splitlines()[-1].removeprefix("MXNetError: ")


def count_right(y_hat: Any, y: Any) -> Any:
    """The number of right predictions, on the device; of length 1, for MXNet's older mode has no scalars."""
    with replicas.numpy_like(), autograd.pause():
        scores, labels = y_hat.as_np_ndarray(), y.as_np_ndarray()
        classes = scores.argmax(axis=1) if scores.ndim > 1 and scores.shape[1] > 1 else scores
        # Sums of booleans are bytes on some devices: counted in floating point, exact far beyond any data set.
        return (classes.reshape(labels.shape).astype(labels.dtype) == labels).astype("float64").sum().reshape((1,))


def count_correct(output: Any, target: Any, *, are_classes: bool = False) -> Any | None:
    """How many rows of class scores are largest at the target; None if these are not class scores."""
    are_arrays = isinstance(output, mx.nd.NDArray) and isinstance(target, mx.nd.NDArray)
    if not are_arrays or len(output.shape) != 2 or len(target.shape) != 1:
        return None
    return count_right(output, target) if are_classes or "int" in str(target.dtype) else None
