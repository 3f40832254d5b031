"""What a step minimises: the loss of a model and a batch, and the number of correct predictions of classes.

A batch is what Keras's ``fit`` takes: ``(x, y)`` or ``(x, y, sample_weight)``, where each may be a dict or a list of
arrays. Or it is arrays alone, ``(inputs..., target, [sample_weight])``; the model says how many inputs there are: a
graph of layers knows, and a user's class names them in ``call``. For a model that takes any number of inputs the last
part is the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import is_binary_or_sparse_categorical

from manyhands.amounts import count_of
from manyhands.errors import BadBatch, BadSettings, ManyhandsError, type_in_words
from manyhands.training import refusals
from manyhands.training.data import roles
from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import Batch, is_nested
from manyhands.training.loss.own_step import call_step, is_default, step_name
from manyhands.training.tensorflow.losses import KerasLoss, Losses, are_of_keras, reduce_values

ACCURACY = ("accuracy", "acc")
Accuracy = Callable[[Any, Any], Any]


# Batches


@dataclass(frozen=True)
class Parts:
    inputs: tuple[Any, ...]  # the arguments of the model
    target: Any  # as Keras's losses take it: one tensor, or a list or a dict of them
    sample_weight: Any = None

    @property
    def has_one_target(self) -> bool:
        return not is_nested(self.target)


def parts_of(model: Any, batch: Sequence[Any]) -> Parts:
    if len(batch) < 2:
        raise refusals.no_target(batch)
    fewest, most = (1, 1) if any(map(is_nested, batch)) else _inputs(model)
    inputs = int(min(most, len(batch) - 1))
    if inputs < fewest or len(batch) > inputs + 2:
        takes = ("" if fewest == most else f"{fewest} to ") + count_of(most, "input")
        raise BadBatch(
            f"a batch has {count_of(len(batch), 'part')}, but {type(model).__name__} takes {takes}: give (inputs..., "
            "target) or (inputs..., target, sample_weight), with several targets in a list or a dict"
        )
    return Parts(tuple(batch[:inputs]), *batch[inputs:])


def inputs_of(model: Any, batch: Sequence[Any], inputs: ModelInputs) -> tuple[Any, ...]:
    """The model's inputs in a batch that may have no targets."""
    if len(batch) == 1 or inputs.targets is False:
        return tuple(batch)
    if inputs.targets is None and not any(map(is_nested, batch)) and len(batch) <= inputs.arrays:
        return tuple(batch[: inputs.count(len(batch))])
    return parts_of(model, batch).inputs


def inputs_for(model: Any, targets: bool | None) -> ModelInputs:
    """The inputs of a model, for prediction; ``targets``: whether the last part of the data is a target."""
    fewest, most = _inputs(model)
    return ModelInputs(type(model).__name__, fewest, most, most, targets)


def _inputs(model: Any) -> tuple[int, float]:
    """The fewest and the most inputs that a model takes."""
    if isinstance(model, Functional):
        return len(model.inputs), len(model.inputs)
    if isinstance(model, keras.Sequential):
        return 1, 1
    call = model.call
    if is_default(model, "call"):  # the book's Module calls forward
        if is_default(model, "forward"):
            net = getattr(model, "net", None)
            return _inputs(net) if isinstance(net, keras.Layer) else (1, math.inf)
        call = model.forward
    inputs = roles.inputs_of(call, ignored=("training", "mask"))
    return max(1, inputs.needed), max(1, inputs.arrays)


def output_of(model: Any, inputs: Sequence[Any], *, training: bool) -> Any:
    """The model's output. If it does not take such inputs, the error describes the user's data."""
    try:
        if isinstance(model, Functional) and len(inputs) > 1:
            return model(list(inputs), training=training)
        return model(*inputs, training=training)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, ManyhandsError):
            raise
        wanted = ", ".join(map(_shape_of, getattr(model, "inputs", None) or ()))
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        takes = f"takes inputs of shape {wanted}" if wanted else f"does not take it ({reason})"
        images = any(isinstance(layer, keras.layers.Conv2D) for layer in model._flatten_layers())
        grey = images and any(len(tensor.shape) == 3 for tensor in keras.tree.flatten(inputs))
        cure = ": images need an axis of channels, X[..., np.newaxis] gives grey ones theirs" if grey else ""
        shapes = ", ".join(map(_shape_of, inputs))
        raise BadBatch(f"a sample of the data has shape {shapes}, and {type(model).__name__} {takes}{cure}") from error


def _shape_of(part: Any) -> str:
    """The shape of one sample; of a dict, shapes by name."""
    if isinstance(part, dict):
        return ", ".join(f"{name!r}: {_shape_of(value)}" for name, value in part.items())
    return ", ".join(str(tuple(leaf.shape[1:])) for leaf in keras.tree.flatten(part))


# Objectives


class Objective(Protocol):
    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        """The loss of these samples, and how many were predicted correctly (or None)."""

    @property
    def is_mean(self) -> bool:
        """Whether the loss is known to add up from parts of a batch; any other loss is evaluated on whole batches."""


@dataclass
class Supervised:
    """A loss of Keras's kind, ``loss(y_true, y_pred)``, of the batch's targets and the model's output."""

    loss: Any  # the user's; None: the cross-entropy of class scores
    keras_loss: KerasLoss | OwnLoss
    accuracy: Accuracy | None = None
    labels: ClassLabels | None = None  # learns from the first output how many classes there are

    @property
    def is_mean(self) -> bool:
        return self.loss is None or are_of_keras(self.loss)

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        parts = parts_of(model, batch)
        output = widen(output_of(model, parts.inputs, training=training))
        if self.labels is not None and tf.is_tensor(output):
            self.labels.learn(output.shape)
        if self.loss is None and not tf.is_tensor(output):
            raise BadSettings(
                f"the model gives {type_in_words(output)} of {len(output)}, and the default loss is the cross-entropy "
                "of one tensor of class scores: give loss=... (one of Keras's, or a function of y_true and y_pred for "
                "each output), or a model with its own training_step(batch)"
            )
        losses = self.keras_loss.losses(parts.target, output, parts.sample_weight)
        correct = None
        if tf.is_tensor(output) and parts.has_one_target:
            correct = (self.accuracy or _of_classes)(parts.target, output)
        return replace(losses, correct=correct, output=output, targets=parts.target)


@dataclass
class OwnLoss:
    """The loss of a model with a ``loss(output, target)`` of its own."""

    model: Any

    def losses(self, target: Any, output: Any, sample_weight: Any = None) -> Losses:
        name = f"loss of {type(self.model).__name__}"
        if sample_weight is not None:
            raise BadBatch(f"the {name} takes no weights of samples: write a training_step(batch)")
        return reduce_values(self.model.loss(output, target), name=name)


@dataclass
class OwnStep:
    """A model with its own ``training_step(batch)``, which returns the mean loss or a LossSum."""

    is_mean: bool = False

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        name = step_name(model, training=training)
        value, accuracy = call_step(model, name, batch)
        losses = reduce_values(value, name=f"{name} of {type(model).__name__}")
        if accuracy is None:
            return losses
        size = tf.shape(keras.tree.flatten(batch)[0])[0]
        return replace(losses, correct=tf.round(tf.cast(accuracy, tf.float64) * tf.cast(size, tf.float64)))


def objective_for(model: Any, loss: Any) -> Objective:
    """``model`` is the caller's, ``loss`` the trainer's option."""
    names = model.output_names if isinstance(model, Functional) else None
    if loss is not None:
        return Supervised(loss, KerasLoss(loss, output_names=names))
    if is_default(model, "training_step"):
        if not is_default(model, "loss"):
            return Supervised(model.loss, OwnLoss(model))  # the same step, with the outputs at hand
    elif hasattr(model, "training_step"):
        return OwnStep()
    elif getattr(model, "compiled", False) and model.loss is not None:
        weights = model._compile_loss._user_loss_weights
        return Supervised(model.loss, KerasLoss(model.loss, weights, names), _compiled_accuracy(model))
    return Supervised(None, KerasLoss(lambda y_true, y_pred: cross_entropy(y_pred, y_true), output_names=names))


def widen(output: Any) -> Any:
    """Half-precision outputs as float32: a loss in half precision loses accuracy. The mask and the scores that Keras
    keeps with an output for its losses stay with it.
    """

    def wide(leaf: Any) -> Any:
        if leaf.dtype.size >= 4:
            return leaf
        mask, scores = keras.src.backend.get_keras_mask(leaf), before_softmax(leaf)
        wider = tf.cast(leaf, tf.float32)
        if mask is not None:
            keras.src.backend.set_keras_mask(wider, mask)
        if scores is not leaf:
            wider._keras_logits = tf.cast(scores, tf.float32)
        return wider

    return tf.nest.map_structure(wide, output)


# The loss by default


def cross_entropy(y_hat: Any, y: Any) -> Any:
    """The cross-entropy of class scores, one number per sample; also of a model that ends with a softmax."""
    return keras.losses.sparse_categorical_crossentropy(y, before_softmax(y_hat), from_logits=True)


def before_softmax(output: Any) -> Any:
    """The scores that a softmax was given, if the output comes from one of Keras's or of TensorFlow's."""
    if hasattr(output, "_keras_logits"):
        return output._keras_logits
    operation = None if tf.is_tensor(output) and hasattr(output, "numpy") else getattr(output, "op", None)
    return operation.inputs[0] if operation is not None and operation.type == "Softmax" else output


# Correct predictions


def _of_classes(target: Any, output: Any) -> Any:
    """How many rows of class scores are largest at the target; None if these are not class scores."""
    if len(output.shape) != 2 or len(target.shape) != 1 or not target.dtype.is_integer:
        return None
    return tf.reduce_sum(tf.cast(tf.argmax(output, 1) == tf.cast(target, tf.int64), tf.float64))


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics of ``model.compile``, in one list."""
    compiled = model._compile_metrics if getattr(model, "compiled", False) else None
    return [] if compiled is None or not compiled._user_metrics else keras.tree.flatten(compiled._user_metrics)


def _compiled_accuracy(model: Any) -> Accuracy | None:
    """The function that counts correct predictions where the model was compiled with accuracy; else None."""
    names = [metric.lower() for metric in compiled_metrics(model) if isinstance(metric, str)]
    return _of_keras if any(name in ACCURACY for name in names) else None


def _of_keras(target: Any, output: Any) -> Any:
    """Correct predictions, counted as by Keras with ``metrics=["accuracy"]``: by score, one-hot or class number."""
    binary, sparse = is_binary_or_sparse_categorical(target, output)
    if binary:
        matches = keras.metrics.binary_accuracy(target, output)
    else:
        kind = keras.metrics.sparse_categorical_accuracy if sparse else keras.metrics.categorical_accuracy
        matches = kind(target, output)
    matches = tf.cast(matches, tf.float64)
    return tf.reduce_sum(tf.reduce_mean(matches, list(range(1, len(matches.shape)))))
