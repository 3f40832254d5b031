"""Keras's optimizers as pure functions: from gradients, weights and optimizer state to the next weights and state.

Every device has its own copy of weights and memory and makes the same update, with gradients that are summed already.
Keras has such a function (``stateless_apply``), but its TensorFlow half replaces the neutral methods of an optimizer by
ones that act on TensorFlow's variables, and sums gradients once more. Below a user's class and above that half we put
one with the neutral methods again: ``SGD -> Optimizer -> Stateless -> TFOptimizer -> BaseOptimizer``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from manyhands.errors import BadSettings
from manyhands.training.optimizers import Optimizers

_neutral = {
    name: vars(BaseOptimizer)[name]
    for name in vars(TFOptimizer)
    if name in vars(BaseOptimizer) and not name.startswith("__")
}
Stateless: Any = type("Stateless", (TFOptimizer,), _neutral)


def _by_name() -> dict[str, type]:
    base = keras.optimizers.Optimizer
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type) and issubclass(kind, base)]
    takes_rate = [kind for kind in kinds if "learning_rate" in inspect.signature(kind).parameters]
    return {kind.__name__.lower(): kind for kind in takes_rate if kind is not base}


OPTIMIZERS = Optimizers(
    where="keras.optimizers",
    example="keras.optimizers.AdamW",
    finished=(keras.optimizers.Optimizer,),
    by_name=_by_name,
    sgd=keras.optimizers.SGD,
    rate="learning_rate",
    of_parameters=False,
)

# What Keras does in a branch of the graph: values of a function cannot leave one.
_BRANCHES = {
    "gradient_accumulation_steps": "give the trainer step=mh.Step(accumulate=...) instead, which saves as much memory",
    "ema_overwrite_frequency": "leave it out, and call optimizer.finalize_variable_values when the training is over",
}


def stateless(optimizer: Any, variables: Sequence[Any]) -> Any:
    """An optimizer like this one for these variables, that has ``stateless_apply``; it remembers nothing yet."""
    for option, cure in _BRANCHES.items():
        if getattr(optimizer, option, None):
            raise BadSettings(f"the optimizer has {option}={getattr(optimizer, option)}: {cure}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise BadSettings("a LossScaleOptimizer is for float16, which is not supported here: give precision='bf16'")
    kind = type(optimizer)
    try:
        with_function: Any = type(kind.__name__, (kind, Stateless), {})
        stateless_optimizer = with_function.from_config(optimizer.get_config())
    except Exception as error:
        raise BadSettings(
            f"an optimizer is recreated for the devices from its get_config(), and a {kind.__name__} could "
            f"not be ({type(error).__name__}: {error}): give it a get_config with all arguments of its __init__"
        ) from error
    stateless_optimizer.loss_scale_factor = None  # it would divide by what no loss was multiplied with
    stateless_optimizer.build(variables)
    stateless_optimizer._exclude_from_weight_decay = {  # no part of a configuration
        stateless_optimizer._var_key(variable)
        for variable in variables
        if not optimizer._use_weight_decay(variable.value)
    }
    return stateless_optimizer


def memory(optimizer: Any, like: Any, model: Any) -> list[Any]:
    """The state of the caller's optimizer, in the order of ``like.variables``.

    An optimizer that was built for other variables than the model's is refused.
    """
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    known = [id(variable) for variable in model.trainable_variables]
    if [id(variable) for variable in optimizer._trainable_variables] != known:
        raise BadSettings(
            f"the {type(optimizer).__name__} was built for the variables of another model: make a new one, or give a "
            "function that does (optimizer=lambda rate: keras.optimizers.SGD(rate))"
        )
    pairs = zip(optimizer.variables, like.variables, strict=True)
    return [variable.numpy().astype(other.dtype) for variable, other in pairs]


def options(optimizer: Any) -> dict[str, Any]:
    """The options of an optimizer that JSON can hold. Checkpoints hold variables only, so the job's options count."""
    made_with = {name: value for name, value in optimizer.get_config().items() if name != "name"}
    numbers = {name: float(value) for name, value in made_with.items() if isinstance(value, float)}
    plain = {name: value for name, value in made_with.items() if type(value) in (bool, int, str, type(None))}
    return plain | {name: value for name, value in numbers.items() if math.isfinite(value)}


def rate_of(optimizer: Any) -> int | None:
    """Which of the optimizer's variables is its learning rate; None where Keras computes it by a schedule."""
    rate = optimizer.learning_rate
    return next((i for i, variable in enumerate(optimizer.variables) if variable is rate), None)


def optimizer_for(optimizer: Any, model: Any, lr: float | None) -> Any:
    """The optimizer that a user means: see :mod:`manyhands.training.optimizers`."""
    if OPTIMIZERS.configured_by(model, optimizer, lr):
        optimizer = model.configure_optimizers()
    if optimizer is None and getattr(model, "compiled", False) and model.optimizer is not None:
        optimizer = model.optimizer
        OPTIMIZERS.refuse_rate(lr, f"a model that was compiled with {type(optimizer).__name__}")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    return OPTIMIZERS.create(model, optimizer, lr)
