"""What a step minimises: the loss of a model and a batch, and the number of correct predictions of classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import is_binary_or_sparse_categorical

from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.sources import Batch
from manyhands.training.loss.own_step import call_step, is_default, step_name
from manyhands.training.tensorflow.batches import Parts, output_of, parts_of
from manyhands.training.tensorflow.losses import KerasLoss, Losses, are_of_keras, reduced

ACCURACY = ("accuracy", "acc")
Accuracy = Callable[[Any, Any], Any]


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
    keras_loss: KerasLoss
    accuracy: Accuracy | None = None
    labels: ClassLabels | None = None  # learns from the first output how many classes there are

    @property
    def is_mean(self) -> bool:
        return self.loss is None or are_of_keras(self.loss)

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        parts = parts_of(model, batch)
        output = _output(model, parts, self.labels, training=training)
        if self.loss is None and not tf.is_tensor(output):
            raise BadSettings(
                f"the model gives {type_in_words(output)} of {len(output)}, and the default loss is the cross-entropy "
                "of one tensor of class scores: give loss=... (one of Keras's, or a function of y_true and y_pred for "
                "each output), or a model with its own training_step(batch)"
            )
        losses = self.keras_loss.losses(parts.target, output, parts.sample_weight)
        return _with_correct(losses, output, parts, self.accuracy)


@dataclass
class BookLoss:
    """The loss of a Module of the book, ``loss(y_hat, y)``."""

    is_mean: bool = False

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        parts = parts_of(model, batch)
        if parts.sample_weight is not None:
            raise BadBatch(
                f"a batch has {len(batch)} parts, and the loss of {type(model).__name__} takes no weights of samples: "
                "write a training_step(batch)"
            )
        output = _output(model, parts, training=training)
        losses = reduced(model.loss(output, parts.target), name=f"loss of {type(model).__name__}")
        return _with_correct(losses, output, parts, None)


@dataclass
class OwnStep:
    """A model with its own ``training_step(batch)``, which returns the mean loss or a LossSum."""

    is_mean: bool = False

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        name = step_name(model, training=training)
        value, accuracy = call_step(model, name, batch)
        losses = reduced(value, name=f"{name} of {type(model).__name__}")
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
            return BookLoss()  # the same step, with the outputs at hand
    elif hasattr(model, "training_step"):
        return OwnStep()
    elif getattr(model, "compiled", False) and model.loss is not None:
        weights = model._compile_loss._user_loss_weights
        return Supervised(model.loss, KerasLoss(model.loss, weights, names), _compiled_accuracy(model))
    return Supervised(None, KerasLoss(lambda y_true, y_pred: cross_entropy(y_pred, y_true), output_names=names))


def _output(model: Any, parts: Parts, labels: ClassLabels | None = None, *, training: bool) -> Any:
    output = widened(output_of(model, parts.inputs, training=training))
    if labels is not None and tf.is_tensor(output):
        labels.learn(output.shape)
    return output


def widened(output: Any) -> Any:
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


def _with_correct(losses: Losses, output: Any, parts: Parts, accuracy: Accuracy | None) -> Losses:
    correct = None
    if tf.is_tensor(output) and parts.has_one_target:
        correct = (accuracy or _of_classes)(parts.target, output)
    return replace(losses, correct=correct, output=output, targets=parts.target)


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
