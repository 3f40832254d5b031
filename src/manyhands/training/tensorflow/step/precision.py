"""A model in another precision. In Keras that is a property of its layers, so the model is rebuilt.

Layers get their precision from their configuration; layers that are created inside other layers get Keras's global
setting, which is set and put back. The new model has the weights of the old one.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.models.functional import Functional

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.data.sources import Batch
from manyhands.training.tensorflow.loss.batch_parts import output_of, parts_of

_POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}


def in_precision(model: Any, precision: str, few: Batch | None) -> Any:
    """The model itself if it has that precision (or ``precision`` is ``"auto"``), else a copy that has it."""
    policy = _POLICIES.get(precision)
    if policy is None:
        return model
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)]
    if all(layer.dtype_policy.name == policy for layer in layers):
        return model
    return like(model, policy, few)


def like(model: Any, policy: str | None, few: Batch | None = None) -> Any:
    """A model of the same layers with the same weights, in that precision (None: its own).

    ``few`` are some samples, for a model that knows its shapes only by them.
    """
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(policy or before)
        new_model = _rebuilt_model(model, policy)
        if not new_model.built and few is not None:
            output_of(new_model, parts_of(new_model, few).inputs, training=False)
        if getattr(model, "compiled", False) and model.loss is not None:  # its compute_loss may ask for it
            new_model.compile(loss=model.loss, loss_weights=model._compile_loss._user_loss_weights)
    except Exception as error:
        raise BadSettings(
            f"{type_in_words(model)} cannot be recreated in {policy or 'its own precision'} "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no reason given'}). "
            f"Make it so yourself: keras.config.set_dtype_policy({policy!r}) before the model, and precision='auto'"
        ) from error
    finally:
        keras.config.set_dtype_policy(before)
    _take_over(new_model, model)
    return new_model


def _rebuilt_model(model: Any, policy: str | None) -> Any:
    def rebuilt(layer: Any) -> Any:
        return type(layer).from_config(_with_policy(layer.get_config(), policy))

    # A model that is nothing but its layers is made of them: their classes need not be known by name.
    plain = type(model) is keras.Sequential or type(model) is Functional
    return keras.models.clone_model(model, clone_function=rebuilt) if plain and model.built else rebuilt(model)


def _with_policy(config: Any, policy: str | None) -> Any:
    """A configuration with another precision for every layer in it."""
    if isinstance(config, dict):
        if policy is not None and config.get("class_name") == "DTypePolicy":
            return {**config, "config": {"name": policy}}
        return {key: _with_policy(value, policy) for key, value in config.items()}
    return [_with_policy(entry, policy) for entry in config] if isinstance(config, list) else config


def _take_over(new_model: Any, model: Any) -> None:
    new_weights, weights = new_model.weights, model.weights
    if [tuple(weight.shape) for weight in new_weights] != [tuple(weight.shape) for weight in weights]:
        raise BadSettings(
            f"{type_in_words(model)} that is recreated from its get_config() has other weights: make the model "
            "yourself in the precision that you want, and leave precision='auto'"
        )
    for variable, other in zip(new_weights, weights, strict=True):
        variable.assign(other.numpy())
        variable.trainable = other.trainable
