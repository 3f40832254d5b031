"""What ``model.compile`` and a model's class say about training: honoured, or refused by name.

Of Keras's own training loop the trainer takes the loss with its weights, the optimizer, regularizers, ``compute_loss``
and accuracy. It cannot take what is written for one device and one process: a ``train_step`` that updates the weights
itself, and metrics that are updated while training; the trainer's own ``metrics=`` are of the validation data.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import is_binary_or_sparse_categorical

from manyhands.errors import BadSettings

_ACCURACY = ("accuracy", "acc")
_OWN_LOOP = {
    "train_step": "write training_step(self, batch), which returns the loss, instead: the trainer takes its gradients "
    "and makes the update",
    "test_step": "write validation_step(self, batch), which returns the loss, beside a training_step(self, batch)",
    "compute_metrics": "leave it out, and give the trainer metrics=[...]",
}
_HALVES = ("float16", "mixed_float16")


def check(model: Any, *, loss: Any, tests: bool) -> None:
    """Refuse settings that the trainer would ignore, unless ``loss=`` or a ``training_step`` replaces them."""
    says_itself = loss is not None or hasattr(model, "training_step")
    for name, advice in _OWN_LOOP.items():
        if (says_itself and name != "compute_metrics") or (name == "test_step" and not tests):
            continue
        if _overrides(model, name):
            raise BadSettings(
                f"{type(model).__name__} has a {name} of its own, which the trainer does not call: {advice}"
            )
    if not getattr(model, "compiled", False):
        return
    if model.run_eagerly:
        raise BadSettings(
            "the model was compiled with run_eagerly=True, and the trainer runs a step as one graph: compile it "
            "without. tf.print shows values in a graph"
        )
    for option, metrics in _metrics(model).items():
        strange = [metric for metric in keras.tree.flatten(metrics) if not _is_accuracy(metric)]
        if strange:
            name = strange[0] if isinstance(strange[0], str) else getattr(strange[0], "name", strange[0])
            raise BadSettings(
                f"the model was compiled with {option}={name!r}, and the trainer takes only accuracy from there: "
                "compile the model without it and give it to the trainer, Trainer(metrics=[...]), which computes it "
                "over the validation data"
            )


def check_precision(model: Any) -> None:
    """Refuse float16: its gradients vanish without a loss scale."""
    for layer in model._flatten_layers():
        if layer.dtype_policy.name in _HALVES:
            raise BadSettings(
                f"layer {layer.name!r} computes in {layer.dtype_policy.name}, whose gradients underflow without loss "
                "scaling, and the trainer has none: give precision='bf16', or "
                "keras.config.set_dtype_policy('mixed_bfloat16') before the model"
            )


def notes(model: Any) -> list[str]:
    """What changes no result and is not done."""
    lines = []
    if getattr(model, "compiled", False) and model.jit_compile and not tf.config.list_physical_devices("GPU"):
        lines.append("the model was compiled with jit_compile=True: the trainer does not use XLA")
    if _metrics(model) and len(getattr(model, "outputs", None) or ()) > 1:
        lines.append(
            "the model was compiled with accuracy, which the trainer counts for one output only: give it a function of "
            "all outputs and targets, metrics={'acc_of_first': function}"
        )
    return lines


def has_own_compute_loss(model: Any) -> bool:
    return _overrides(model, "compute_loss")


def accuracy(model: Any) -> Any:
    """The function that counts correct predictions where the model was compiled with accuracy; else None."""
    wanted = [metric for metrics in _metrics(model).values() for metric in keras.tree.flatten(metrics)]
    return _correct if wanted else None


def _overrides(model: Any, name: str) -> bool:
    plain = getattr(keras.Model, name)
    return isinstance(model, keras.Model) and getattr(type(model), name) is not plain


def _metrics(model: Any) -> dict[str, Any]:
    compiled = model._compile_metrics if getattr(model, "compiled", False) else None
    if compiled is None:
        return {}
    both = {"metrics": compiled._user_metrics, "weighted_metrics": compiled._user_weighted_metrics}
    return {name: value for name, value in both.items() if value}


def _is_accuracy(metric: Any) -> bool:
    return isinstance(metric, str) and metric.lower() in _ACCURACY


def _correct(target: Any, output: Any) -> Any:
    """Correct predictions, counted as by Keras with ``metrics=["accuracy"]``: by score, one-hot or class number."""
    binary, sparse = is_binary_or_sparse_categorical(target, output)
    if binary:
        matches = keras.metrics.binary_accuracy(target, output)
    else:
        kind = keras.metrics.sparse_categorical_accuracy if sparse else keras.metrics.categorical_accuracy
        matches = kind(target, output)
    matches = tf.cast(matches, tf.float64)
    return tf.reduce_sum(tf.reduce_mean(matches, list(range(1, len(matches.shape)))))
