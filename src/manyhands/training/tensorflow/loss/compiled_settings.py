"""What ``model.compile`` and a model's class say about training: honoured, or refused by name.

Of Keras's own training loop the trainer takes the loss with its weights, the optimizer, regularizers, ``compute_loss``
and metrics, which are of the validation data. It cannot take what is written for one device and one process: a
``train_step`` that updates the weights itself.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import is_binary_or_sparse_categorical

from manyhands.errors import BadSettings
from manyhands.training.evaluation.metrics import MetricCalls, Metrics, name_of

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


def check_precision(model: Any) -> None:
    """Refuse float16: its gradients vanish without a loss scale."""
    for layer in model._flatten_layers():
        if layer.dtype_policy.name in _HALVES:
            raise BadSettings(
                f"layer {layer.name!r} computes in {layer.dtype_policy.name}, whose gradients underflow without loss "
                "scaling, and the trainer has none: give precision='bf16', or "
                "keras.config.set_dtype_policy('mixed_bfloat16') before the model"
            )


def notes(model: Any, *, tests: bool) -> list[str]:
    """What changes no result and is not done, or is done otherwise than by ``model.fit``."""
    lines = []
    if getattr(model, "compiled", False) and model.jit_compile and not tf.config.list_physical_devices("GPU"):
        lines.append("the model was compiled with jit_compile=True: the trainer does not use XLA")
    if not tests and _names(model):
        lines.append("metrics of model.compile are computed over validation data, and there are none")
    generators = ((layer.name, each) for layer in model._flatten_layers() for each in layer._seed_generators)
    if seeded := [name for name, generator in generators if generator._initial_seed is not None]:
        lines.append(
            f"layer {seeded[0]!r} has a seed of its own: random layers draw by the trainer's seed=, the step and the "
            "device, so that a resumed job draws the same numbers; they are others than those of model.fit"
        )
    return lines


def has_own_compute_loss(model: Any) -> bool:
    return _overrides(model, "compute_loss")


def accuracy(model: Any) -> Any:
    """The function that counts correct predictions where the model was compiled with accuracy; else None."""
    wanted = [metric for metrics in _metrics(model).values() for metric in keras.tree.flatten(metrics)]
    return _correct if any(isinstance(metric, str) and metric.lower() in _ACCURACY for metric in wanted) else None


def _overrides(model: Any, name: str) -> bool:
    plain = getattr(keras.Model, name)
    return isinstance(model, keras.Model) and getattr(type(model), name) is not plain


def _metrics(model: Any) -> dict[str, Any]:
    compiled = model._compile_metrics if getattr(model, "compiled", False) else None
    if compiled is None:
        return {}
    both = {"metrics": compiled._user_metrics, "weighted_metrics": compiled._user_weighted_metrics}
    return {name: value for name, value in both.items() if value}


def weighs_metrics(model: Any) -> bool:
    return "weighted_metrics" in _metrics(model)


def with_compiled(metrics: Metrics, model: Any) -> Metrics:
    """The trainer's metrics, and those that the model was compiled with, under the names that Keras gives them."""
    names = _names(model)
    if not names:
        return metrics
    compiled = model._compile_metrics

    def result() -> dict[str, Any]:
        counted = _ACCURACY if len(compiled._flat_metrics) == 1 else ()
        return {name: value for name, value in compiled.result().items() if name not in counted}

    def update(outputs: Any, targets: Any) -> None:
        compiled.update_state(targets, outputs)

    meter = MetricCalls(compiled.reset_state, update, result)
    return Metrics({"": meter, **metrics.meters}, (*names, *metrics.names))


def _names(model: Any) -> list[str]:
    """The names of the compiled metrics. The trainer counts the accuracy of a single output itself."""
    given = [name_of(metric) for metrics in _metrics(model).values() for metric in keras.tree.flatten(metrics)]
    if _outputs(model) == 1:
        return [name for name in given if name not in _ACCURACY]
    return [f"{output}_{name}" for output in getattr(model, "output_names", ()) for name in given]


def _outputs(model: Any) -> int:
    outputs = getattr(model, "outputs", None)  # a property, where somebody gives the class of a model
    return len(outputs) if isinstance(outputs, (list, tuple)) and outputs else 1


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
