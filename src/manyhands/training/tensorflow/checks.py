"""Checks before a job begins. On one device they make no pass through the model or the loss.

There are two exceptions: layers that have seen no sample need a few to get their shapes, and on several devices, or
with ``accumulate``, the loss is tried once (:mod:`manyhands.training.loss.loss_trial`). What the trainer would ignore
of a model or of ``model.compile`` is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from manyhands.errors import BadSettings
from manyhands.training import refusals
from manyhands.training.data.labels import ClassLabels, Look, check_sources
from manyhands.training.data.sources import Arrays, Source
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import Pass, Term
from manyhands.training.tensorflow.model import Function, apply_changes, without_noise
from manyhands.training.tensorflow.objective import Objective, OwnStep, Supervised, output_of, parts_of

_FEW = 2
_OWN_LOOP = {
    "train_step": "write training_step(self, batch), which returns the loss, instead: the trainer takes its gradients "
    "and makes the update",
    "compute_loss": "write training_step(self, batch), which returns the loss, instead",
    "test_step": "write validation_step(self, batch), which returns the loss, beside a training_step(self, batch)",
    "compute_metrics": "leave it out, and give the trainer metrics=[...]",
}


def check_model(model: Any) -> None:
    if keras.config.backend() != "tensorflow":
        backend = keras.config.backend()
        raise BadSettings(f"Keras computes with {backend}: set KERAS_BACKEND=tensorflow before it is imported")
    if not isinstance(model, keras.Layer):
        raise refusals.not_a_model(model, "a keras.Model or a keras.Layer")
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise BadSettings(
                f"layer {layer.name!r} has stateful=True, which carries its state from each batch to the next: batches "
                "here are shuffled and divided over devices. Make it with stateful=False, and give whole sequences"
            )
        if layer.dtype_policy.name in ("float16", "mixed_float16"):
            raise BadSettings(
                f"layer {layer.name!r} computes in {layer.dtype_policy.name}, whose gradients underflow without loss "
                "scaling, and the trainer has none: keras.config.set_dtype_policy('mixed_bfloat16') before the model"
            )


def check_compiled(model: Any, *, loss: Any, tests: bool) -> None:
    """Refuse settings that the trainer would ignore, unless ``loss=`` or a ``training_step`` replaces them."""
    says_itself = loss is not None or hasattr(model, "training_step")
    for name, advice in _OWN_LOOP.items() if isinstance(model, keras.Model) else ():
        if (says_itself and name != "compute_metrics") or (name == "test_step" and not tests):
            continue
        if getattr(type(model), name) is not getattr(keras.Model, name):
            own = f"{type(model).__name__} has a {name} of its own"
            raise BadSettings(f"{own}, which the trainer does not call: {advice}")
    if not getattr(model, "compiled", False):
        return
    if model.run_eagerly:
        raise BadSettings("the model was compiled with run_eagerly=True, and a step is one graph: compile it without")
    if model._compile_metrics is not None and model._compile_metrics._user_weighted_metrics:
        raise BadSettings("the model was compiled with weighted_metrics, which get no weights here: give metrics=")


def materialise(model: Any, data: Source) -> None:
    """Build layers that have seen no sample yet; then check that there is something to train.

    As in Keras, the shapes of a few samples are enough: nothing is computed.
    """
    if (not model.built or not model.weights) and not data.is_read_once:
        few = keras.tree.map_structure(_shape, data.few(_FEW, tf.convert_to_tensor))
        output_of(model, parts_of(model, few).inputs, training=False)
    if not model.trainable_variables:
        raise refusals.nothing_to_train(model, "set trainable = True in a layer that has weights")


def _shape(part: Any) -> Any:
    return keras.KerasTensor((None, *part.shape[1:]), part.dtype.name)


# Labels


def check_labels(model: Any, objective: Objective, *sources: Source | None) -> Look | None:
    """Check that the model has an output for every label: on a GPU the loss would become NaN much later."""
    if not isinstance(objective, Supervised) or not _of_classes(objective.loss):
        return None
    of_keras = objective.loss is not None  # its own losses take more kinds of labels
    ignored = getattr(objective.loss, "ignore_class", None)
    objective.labels = labels = ClassLabels(ignored=ignored, floats=of_keras, columns=of_keras)

    def label_of(batch: Sequence[Any]) -> Any:
        return parts_of(model, batch).target if len(batch) > 1 else None

    return check_sources(labels, label_of, *sources)


def _of_classes(loss: Any) -> bool:
    """Whether it is a cross-entropy of class numbers: the default, or Keras's by name, as a class or an object."""
    kind = keras.losses.SparseCategoricalCrossentropy
    if isinstance(loss, str):
        return loss.lower().replace("_", "") == "sparsecategoricalcrossentropy"
    known = (None, kind, keras.losses.sparse_categorical_crossentropy)
    return any(loss is each for each in known) or isinstance(loss, kind)


# The loss


def check_loss(model: Any, objective: Objective, train: Source) -> list[str]:
    """Refuse a loss whose parts do not add up to the batch; notes if that could not be checked.

    The model is a function of its weights here, so that none of its variables changes, and traced once.
    """
    function, seeds = Function(model, objective, 0), itertools.count()
    graph: Any = None
    with apply_changes(without_noise(model)), tf.device("/device:CPU:0"):

        def compute(data: Arrays, rows: Sequence[int]) -> Pass:
            nonlocal graph
            graph = graph or _graph(function, data)
            terms = graph(tf.constant(next(seeds)), *map(tf.convert_to_tensor, data.rows(rows)))
            wide = [[gradient.numpy().astype(np.float64) for gradient in gradients] for _, _, gradients in terms]
            return Pass([Term(float(term[0]), float(term[1]), part) for term, part in zip(terms, wide, strict=True)])

        precisions = {str(layer.compute_dtype) for layer in model._flatten_layers()}
        own = isinstance(objective, OwnStep)
        return loss_trial.check_source(train, compute, precisions=precisions, own_step=own)


def _graph(function: Function, data: Arrays) -> Any:
    """The terms of the loss with their gradients, traced once: the user's code runs for no pass but the first."""
    weights = [tf.convert_to_tensor(variable.value) for variable in function.trained]
    statistics = [tf.convert_to_tensor(variable.value) for variable in function.statistics]

    def work(seed: Any, *arrays: Any) -> list[tuple[Any, Any, list[Any]]]:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(weights)
            losses, _ = function(weights, statistics, (seed,), data.nest(data.prepare(arrays)), training=True)
            size = tf.shape(arrays[0])[0]
            mean = [] if losses.mean is None else [(losses.mean * tf.cast(size, losses.mean.dtype), size)]
            terms = mean + [(part.total, part.count) for part in losses.sums]
        gradients = [tape.gradient(total, weights, unconnected_gradients="zero") for total, _ in terms]
        dense = [[tf.convert_to_tensor(gradient) for gradient in part] for part in gradients]
        return [(total, count, part) for (total, count), part in zip(terms, dense, strict=True)]

    parts = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data.arrays]
    return tf.function(work, autograph=False, input_signature=[tf.TensorSpec([], tf.int32), *parts])
