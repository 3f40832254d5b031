"""What a step minimises: the loss of a model and a batch, and the number of correct predictions of classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from manyhands.errors import BadBatch, BadSettings, type_in_words
from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.sources import Batch
from manyhands.training.loss.own_step import call_step, is_default, step_name
from manyhands.training.tensorflow.loss.batch_parts import Parts, checked_output, parts_of
from manyhands.training.tensorflow.loss.keras_losses import (
    KerasLoss,
    Losses,
    are_of_keras,
    as_keras,
    of_whole_batch,
    reduced,
)

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

    loss: KerasLoss
    accuracy: Accuracy | None = None
    labels: ClassLabels | None = None  # learns from the first output how many classes there are

    @property
    def objects(self) -> list[keras.losses.Loss]:
        """The losses that the user gave as Keras objects."""
        return [loss for loss in keras.tree.flatten(self.loss.loss) if isinstance(loss, keras.losses.Loss)]

    @property
    def is_mean(self) -> bool:
        return are_of_keras(self.loss.loss) and of_whole_batch(self.loss.loss) is None

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum over the batch, so that it grows with the size of batches."""
        return any(loss.reduction == "sum" for loss in self.objects)

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        parts = parts_of(model, batch)
        output = _output(model, parts, self.labels, training=training)
        return _with_correct(self.loss(parts.target, output, parts.sample_weight), output, parts, self.accuracy)


@dataclass
class ClassScores:
    """The book's kind of loss, ``loss(y_hat, y)``: a Module's own, or cross-entropy by default."""

    has_loss: bool = False
    labels: ClassLabels | None = None

    @property
    def is_mean(self) -> bool:
        return not self.has_loss

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        parts = parts_of(model, batch)
        output = _output(model, parts, self.labels, training=training)
        if parts.sample_weight is not None:
            raise BadBatch(
                f"a batch has {len(batch)} parts, which {type(model).__name__} can only take for (inputs, target, "
                f"sample_weight), and {'its own loss' if self.has_loss else 'the default loss'} takes no weights: give "
                "a loss of Keras's, as loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
            )
        if self.has_loss:
            losses = reduced(model.loss(output, parts.target), name=f"loss of {type(model).__name__}")
        else:
            _check_scores(output, parts)
            losses = reduced(cross_entropy(output, parts.target), name="cross_entropy")
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


@dataclass
class OwnComputeLoss:
    """A Keras model with its own ``compute_loss``, called as Keras calls it. It adds regularizers itself."""

    accuracy: Accuracy | None = None
    is_mean: bool = False

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> Losses:
        parts = parts_of(model, batch)
        output = _output(model, parts, training=training)
        x = list(parts.inputs) if len(parts.inputs) > 1 else parts.inputs[0]
        value = model._compute_loss(x, parts.target, output, parts.sample_weight, training=training)
        losses = as_keras(value, name=f"compute_loss of {type(model).__name__}")
        return _with_correct(replace(losses, complete=True), output, parts, self.accuracy)


def _output(model: Any, parts: Parts, labels: ClassLabels | None = None, *, training: bool) -> Any:
    output = widened(checked_output(model, parts, training=training))
    if labels is not None and tf.is_tensor(output):
        labels.learn(output.shape)
    return output


def _check_scores(output: Any, parts: Parts) -> None:
    if not tf.is_tensor(output):
        raise BadSettings(
            f"the model gives {type_in_words(output)} of {len(output)}, and the default loss is the cross-entropy of "
            "one tensor of class scores: give loss=... (one of Keras's, or a function of y_true and y_pred for each "
            "output), or a model with its own training_step(batch)"
        )
    if not parts.has_one_target:
        raise BadSettings(f"there are {len(parts.target)} targets, and no loss was given: give loss=...")


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


def _with_correct(losses: Losses, output: Any, parts: Parts, accuracy: Accuracy | None) -> Losses:
    correct = None
    if tf.is_tensor(output) and parts.has_one_target:
        correct = count_correct(output, parts.target) if accuracy is None else accuracy(parts.target, output)
    return replace(losses, correct=correct, output=output, targets=parts.target)


def count_correct(output: Any, target: Any) -> Any:
    """How many rows of class scores are largest at the target; None if these are not class scores."""
    if len(output.shape) != 2 or len(target.shape) != 1 or not target.dtype.is_integer:
        return None
    return tf.reduce_sum(tf.cast(tf.argmax(output, 1) == tf.cast(target, tf.int64), tf.float64))


def objective_for(model: Any, loss: Any) -> Objective:
    """``model`` is the caller's, ``loss`` the trainer's option."""
    from manyhands.training.tensorflow.loss import compiled_settings

    if loss is not None:
        return Supervised(KerasLoss(loss, output_names=_output_names(model)))
    if is_default(model, "training_step"):
        return ClassScores(has_loss=not is_default(model, "loss"))  # the same step, with the outputs at hand
    if hasattr(model, "training_step"):
        return OwnStep()
    if compiled_settings.has_own_compute_loss(model):
        return OwnComputeLoss(compiled_settings.accuracy(model))
    if getattr(model, "compiled", False) and model.loss is not None:
        weights = model._compile_loss._user_loss_weights
        return Supervised(KerasLoss(model.loss, weights, _output_names(model)), compiled_settings.accuracy(model))
    return ClassScores()


def _output_names(model: Any) -> Any:
    return model.output_names if isinstance(model, Functional) else None


def cross_entropy(y_hat: Any, y: Any) -> Any:
    """The cross-entropy of class scores, one number per sample; also of a model that ends with a softmax."""
    # TensorFlow takes two kinds alone, and labels are often bytes (Keras's own data sets have such).
    known = y if not tf.is_tensor(y) or not y.dtype.is_integer else tf.cast(y, tf.int64)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(known, before_softmax(y_hat))


def before_softmax(output: Any) -> Any:
    """The scores that a softmax was given, if the output comes from one of Keras's or of TensorFlow's."""
    if hasattr(output, "_keras_logits"):
        return output._keras_logits
    operation = None if tf.is_tensor(output) and hasattr(output, "numpy") else getattr(output, "op", None)
    return operation.inputs[0] if operation is not None and operation.type == "Softmax" else output
