"""What is looked at before a job begins: a few samples through the model say more than an error of a device later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from manyhands.errors import BadSettings, NotATensor
from manyhands.training.labels import ClassLabels
from manyhands.training.sources import Arrays, Batch, Source, Stream
from manyhands.training.tensorflow.book import Module, cross_entropy
from manyhands.training.tensorflow.objective import Objective, Supervised, answer_of

_FEW = 2
_HALVES = 4  # samples that a loss is tried on, as a whole and in halves
_CLOSE = {tf.float64: 1e-6, tf.float32: 1e-3}
_OTHERWISE_CLOSE = 3e-2


def check_model(model: Any) -> None:
    if keras.config.backend() != "tensorflow":
        raise BadSettings(
            f"Keras computes with {keras.config.backend()} in this program: set KERAS_BACKEND=tensorflow before it is "
            "imported"
        )
    if not isinstance(model, keras.Layer):
        raise NotATensor(f"a {type(model).__name__} is no model of Keras's: give a keras.Model or a keras.Layer")


def materialise(model: Any, data: Source) -> None:
    """Give layers that have seen no sample their shapes, by a few samples; then there must be something to train."""
    if not model.built or not model.weights:
        few = few_samples(data, _FEW)
        if few is not None:
            answer_of(model, few[:-1], training=False)
    if not model.trainable_variables:
        raise BadSettings(f"a {type(model).__name__} has no parameters that could be trained")


# Labels


def check_labels(model: Any, objective: Objective, train: Source, test: Source | None) -> ClassLabels | None:
    """Labels that the model has no output for: on a GPU their loss would be no number, long after.

    Those of arrays are looked at now; for those of a loader a check is given back.
    """
    loss = objective.loss if isinstance(objective, Supervised) else _default_loss(model)
    if not _of_classes(loss):
        return None
    try:
        few = few_samples(train, _FEW)
        scores: Any = None if few is None else answer_of(model, few[:-1], training=False)
    except Exception:  # the first step will say it, with all that belongs to it
        return None
    if not tf.is_tensor(scores) or len(scores.shape) != 2:
        return None
    of_keras = loss is not cross_entropy  # its own losses take more kinds of labels
    look = ClassLabels(scores.shape[1], getattr(loss, "ignore_class", None), floats=of_keras, columns=of_keras)
    for source in (train, test):
        if isinstance(source, Arrays) and len(source.arrays) > 1:
            look(source.arrays)
    return look


def _default_loss(model: Any) -> Any:
    """Cross-entropy, where a subclass of the book's Module says nothing else."""
    says_nothing = type(model).loss is Module.loss and type(model).training_step is Module.training_step
    return cross_entropy if says_nothing else None


def _of_classes(loss: Any) -> bool:
    known = (cross_entropy, keras.losses.sparse_categorical_crossentropy)
    return loss in known or isinstance(loss, keras.losses.SparseCategoricalCrossentropy)


# The loss


def check_loss(model: Any, objective: Objective, train: Source) -> None:
    """Refuse a loss that is no mean over samples where a batch is worked off in parts: the parts would not add up."""
    loss: Any = getattr(objective, "loss", None)
    if getattr(loss, "ignore_class", None) is not None and loss.reduction not in ("sum", "none", None):
        raise BadSettings(
            f"the loss leaves out labels of class {loss.ignore_class}: its mean divides by the others, and in parts of "
            "a batch (several devices, or accumulate) that is not what it is in the whole. Give reduction='sum': the "
            "trainer then divides by the number of samples, exactly on any number of devices"
        )
    few = few_samples(train, _HALVES)
    if few is None or len(few[0]) < 2:
        return
    half = len(few[0]) // 2
    parts = [tuple(one[:half] for one in few), tuple(one[half:] for one in few)]
    try:
        first, again = (objective(model, few, training=False)[0] for _ in range(2))
        halves = [float(objective(model, part, training=False)[0]) * len(part[0]) for part in parts]
    except Exception:  # the first step will say it, with all that belongs to it
        return
    whole, mean, close = float(first), sum(halves) / len(few[0]), _CLOSE.get(first.dtype, _OTHERWISE_CLOSE)
    if not math.isfinite(whole) or whole != float(again):  # it draws random numbers: that says nothing
        return
    if not math.isclose(whole, mean, rel_tol=close, abs_tol=close * 1e-3):
        raise BadSettings(
            f"the loss of {len(few[0])} samples is {whole:.6g}, but that of their two halves is {mean:.6g} on average: "
            "on several devices, or with accumulate, the batch is worked off in parts, and this loss would then train "
            "another model than one device does. The loss must be the mean over the samples of the batch: divide a sum "
            "by the number of samples, or give a loss with reduction=None, of which the trainer takes the mean"
        )


# A few samples


def few_samples(data: Source, count: int) -> Batch | None:
    """The first samples; None for an iterator, from which a look would take them away."""
    if isinstance(data, Arrays):
        return data.prepare(tuple(tf.convert_to_tensor(one) for one in data.rows(slice(count))))
    if isinstance(data, Stream) and isinstance(data.loader, Iterator):
        return None
    return tuple(tf.convert_to_tensor(one[:count]) for one in data.first_batch())
