"""What a step minimises: from a model and a batch to a loss, and to the number of right answers where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from manyhands.errors import BadBatch
from manyhands.training.sources import Batch
from manyhands.training.tensorflow.book import Module, cross_entropy

Loss = Callable[[Any, Any], Any]


class Objective(Protocol):
    def __call__(self, model: Any, batch: Batch, *, training: bool) -> tuple[Any, Any]:
        """The loss as a mean over the samples of the batch, and how many were answered rightly (or None)."""


@dataclass
class Supervised:
    """A loss of the model's answer and the last part of the batch: ``loss(model(*inputs), target)``."""

    loss: Loss

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> tuple[Any, Any]:
        inputs, target = inputs_and_target(batch)
        answer = widened(answer_of(model, inputs, training=training))
        return mean_loss(self.loss, answer, target), right_answers(answer, target)


@dataclass
class OwnStep:
    """A model that says itself what a step is: ``training_step(batch)`` gives the mean loss."""

    def __call__(self, model: Any, batch: Batch, *, training: bool) -> tuple[Any, Any]:
        if isinstance(model, Module) and type(model).training_step is Module.training_step:
            return Supervised(model.loss)(model, batch, training=training)  # the same step, with the answers at hand
        step = model.training_step if training else getattr(model, "validation_step", model.training_step)
        return step(batch), None


def inputs_and_target(batch: Batch) -> tuple[Sequence[Any], Any]:
    """The last part of a batch is the target, all others are the model's inputs."""
    if len(batch) < 2:
        raise BadBatch(
            "a batch (inputs, target) is needed, and there is only one part: give both, or a model with a "
            "training_step(batch) of its own"
        )
    return batch[:-1], batch[-1]


def answer_of(model: Any, inputs: Sequence[Any], *, training: bool) -> Any:
    """What the model says; one that was drawn as a graph of layers takes several inputs as a list."""
    if isinstance(model, Functional) and len(inputs) > 1:
        return model(list(inputs), training=training)
    return model(*inputs, training=training)


def widened(answer: Any) -> Any:
    """Scores in half precision as float32: losses lose by it."""
    return tf.nest.map_structure(lambda one: tf.cast(one, tf.float32) if one.dtype.size < 4 else one, answer)


def mean_loss(loss: Loss, answer: Any, target: Any) -> Any:
    """The mean over samples, whatever reduction the loss has.

    Keras's own losses take (target, answer), all others (answer, target).
    """
    if tf.is_tensor(target) and tf.is_tensor(answer) and target.dtype.is_floating:
        target = tf.cast(target, answer.dtype)
    value = tf.convert_to_tensor(loss(target, answer) if is_keras(loss) else loss(answer, target))
    if len(value.shape):
        return tf.reduce_sum(value) / tf.cast(tf.maximum(tf.shape(value)[0], 1), value.dtype)
    if getattr(loss, "reduction", None) == "sum":
        return value / tf.cast(tf.maximum(tf.shape(target)[0], 1), value.dtype)
    return value


def is_keras(loss: Any) -> bool:
    """Whether it is a loss of Keras's: an object or one of its functions."""
    return isinstance(loss, keras.losses.Loss) or str(getattr(loss, "__module__", "")).partition(".")[0] == "keras"


def right_answers(answer: Any, target: Any) -> Any:
    """How many rows of class scores have their largest at the target; None where that has no meaning."""
    if not (tf.is_tensor(answer) and tf.is_tensor(target)):
        return None
    if len(answer.shape) != 2 or len(target.shape) != 1 or not target.dtype.is_integer:
        return None
    return tf.reduce_sum(tf.cast(tf.argmax(answer, 1) == tf.cast(target, tf.int64), tf.float64))


def objective_for(model: Any, loss: Loss | None) -> Objective:
    if loss is None and hasattr(model, "training_step"):
        return OwnStep()
    if loss is None and getattr(model, "compiled", False) and model.loss is not None:
        loss = keras.losses.get(model.loss)
    return Supervised(loss or cross_entropy)
