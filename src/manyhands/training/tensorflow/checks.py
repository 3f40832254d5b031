"""Checks before a job begins. On one device they make no pass through the model or the loss.

There are two exceptions: layers that have seen no sample need a few to get their shapes, and on several devices, or
with ``accumulate``, the loss is tried once (:mod:`manyhands.training.loss.loss_trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from manyhands.errors import BadSettings, type_in_words
from manyhands.training import refusals
from manyhands.training.data.labels import ClassLabels, why_no_classes_in
from manyhands.training.data.sources import Arrays, Batch, Source
from manyhands.training.loss import loss_trial, own_step
from manyhands.training.tensorflow.loss import compiled_settings, keras_losses
from manyhands.training.tensorflow.loss.batch_parts import checked_output, parts_of
from manyhands.training.tensorflow.loss.loss_trial import try_loss
from manyhands.training.tensorflow.objective import ClassScores, Objective, OwnStep, Supervised, objective_for
from manyhands.training.tensorflow.step.function import Function

_FEW = 2


def check_model(model: Any) -> None:
    if keras.config.backend() != "tensorflow":
        raise BadSettings(
            f"Keras computes with {keras.config.backend()} in this program: set KERAS_BACKEND=tensorflow before it is "
            "imported"
        )
    if not isinstance(model, keras.Layer):
        raise refusals.not_a_model(model, "a keras.Model or a keras.Layer")
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise BadSettings(
                f"layer {layer.name!r} has stateful=True, which carries its state from each batch to the next: batches "
                "here are shuffled and divided over devices. Make it with stateful=False, and give whole sequences"
            )


def check_metrics(model: Any, test: Source | None) -> None:
    """Refuse ``weighted_metrics`` over validation data with weights of samples: metrics are given no weights."""
    if test is None or not compiled_settings.weighs_metrics(model):
        return
    few = few_samples(test, 1)
    if few is None or parts_of(model, few).sample_weight is not None:
        raise BadSettings(
            "the model was compiled with weighted_metrics, and the validation data have weights of samples, which the "
            "trainer gives to the loss alone: compile the model with metrics=, or leave the weights out of these data"
        )


def materialise(model: Any, data: Source) -> None:
    """Build layers that have seen no sample yet; then check that there is something to train.

    As in Keras, the shapes of a few samples are enough: nothing is computed.
    """
    if not model.built or not model.weights:
        few = few_samples(data, _FEW)
        if few is not None:
            shapes = keras.tree.map_structure(_shape, few)
            checked_output(model, parts_of(model, shapes), training=False)
    if not model.trainable_variables:
        raise BadSettings(
            f"{type_in_words(model)} has no parameters that could be trained: set trainable = True in a layer that has "
            "weights"
        )


def _shape(part: Any) -> Any:
    return keras.KerasTensor((None, *part.shape[1:]), part.dtype.name)


# Labels


LabelCheck = Callable[[Sequence[Any]], None]  # checks the labels of a batch


def check_labels(model: Any, objective: Objective, train: Source, test: Source | None) -> LabelCheck | None:
    """Check that the model has an output for every label: on a GPU the loss would become NaN much later.

    Labels of arrays are checked now; the returned function checks those of a loader. The objective learns the number of
    outputs from the first output.
    """
    if not isinstance(objective, (ClassScores, Supervised)) or not _of_classes(objective):
        return None
    of_keras = isinstance(objective, Supervised)  # its own losses take more kinds of labels
    ignored = getattr(objective.loss.loss, "ignore_class", None) if isinstance(objective, Supervised) else None
    objective.labels = labels = ClassLabels(ignored=ignored, floats=of_keras, columns=of_keras)

    def look(batch: Sequence[Any]) -> None:
        parts = parts_of(model, batch)
        if parts.has_one_target:
            labels((*keras.tree.flatten(parts.inputs), parts.target))

    for source in (train, test):
        if isinstance(source, Arrays) and len(source.arrays) > 1:
            look(source.nested(source.arrays))
    return look


def why_no_accuracy(model: Any, loss: Any, data: Source, *, training: bool) -> str | None:
    """Why there will be no accuracy, if that is known before the first step; None: there may be one."""
    check_model(model)
    objective = objective_for(model, loss)
    if isinstance(objective, OwnStep):
        return own_step.why_no_accuracy(model, training=training)
    if getattr(objective, "accuracy", None) is not None or not isinstance(data, Arrays) or data.structure is not None:
        return None
    return why_no_classes_in(data.arrays)


def _of_classes(objective: Objective) -> bool:
    if isinstance(objective, ClassScores):
        return not objective.has_loss
    loss = objective.loss.loss if isinstance(objective, Supervised) else None
    kind = keras.losses.SparseCategoricalCrossentropy
    if isinstance(loss, str):
        return loss.lower().replace("_", "") == "sparsecategoricalcrossentropy"
    is_object: bool = isinstance(loss, kind)
    return is_object or loss is kind or loss is keras.losses.sparse_categorical_crossentropy


# The loss


def check_loss(model: Any, objective: Objective, train: Source) -> str | None:
    """Refuse a loss whose parts do not add up to the batch; a note if that could not be checked."""
    if train.is_read_once:
        return loss_trial.note(loss_trial.READ_ONCE)
    try:
        why = try_loss(Function(model, objective, 0), loss_trial.arrays_of(train))
        return None if why is None else loss_trial.note(why)
    except BadSettings as error:
        if isinstance(objective, Supervised) and (name := keras_losses.of_whole_batch(objective.loss.loss)):
            raise BadSettings(
                f"{name} of Keras is one ratio over all samples of a batch, and on several devices, or with "
                "accumulate, a batch is processed in parts: train on one device, with accumulate=1. With the axes of a "
                f"sample, as {name}(axis=(1, 2, 3)) for images, it is a loss of each sample, which any number of "
                "devices can train with"
            ) from error
        raise


def few_samples(data: Source, count: int) -> Batch | None:
    """The first samples; None for an iterator, because reading them would consume them."""
    return None if data.is_read_once else data.few(count, tf.convert_to_tensor)
