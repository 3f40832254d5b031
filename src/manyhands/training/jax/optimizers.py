"""Makes the optimizer of a job; :mod:`manyhands.training.choices.optimizers` says whose learning rate counts."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from manyhands.errors import BadSettings
from manyhands.training.choices.optimizers import Optimizers
from manyhands.training.jax.book.module import Module


def _by_name() -> dict[str, Any]:
    functions = {
        name: function
        for name, function in vars(optax).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    return {name: function for name, function in functions.items() if _is_maker(name, function)}


def _is_maker(name: str, function: Any) -> bool:
    return not name.startswith("scale_by") and next(iter(inspect.signature(function).parameters), "") == "learning_rate"


OPTIMIZERS = Optimizers(
    where="optax",
    example="optax.adamw",
    finished=(optax.GradientTransformation,),
    by_name=_by_name,
    sgd=optax.sgd,
    rate="learning_rate",
    of_parameters=False,
    default_configure=Module.configure_optimizers,
)


def check(optimizer: Any, lr: float | None) -> None:
    """Refuse what is not an Optax optimizer; for a wrapper, name the optimizer inside."""
    if isinstance(optimizer, nnx.Optimizer):
        raise BadSettings(
            "an nnx.Optimizer holds one model's state: give the trainer the Optax optimizer that it was made with, "
            "its .tx"
        )
    if isinstance(optimizer, optax.MultiSteps):
        raise BadSettings("optax.MultiSteps wraps an optimizer and is none itself: give its .gradient_transformation()")
    OPTIMIZERS.check(optimizer, lr)


def optimizer_for(
    model: Any, optimizer: Any, lr: float | None, *, scheduled: bool
) -> tuple[optax.GradientTransformation, str]:
    """The optimizer, and a name for it: Optax has no names, so the parts of its state make one."""
    if optimizer is None and OPTIMIZERS.configured_by(model, lr):
        optimizer = model.configure_optimizers()
        check(optimizer, None)
    is_finished = isinstance(optimizer, optax.GradientTransformation)
    transformation = optimizer if is_finished else OPTIMIZERS.created(model, optimizer, lr)
    parts: list[str] = []
    _state_names(jax.eval_shape(transformation.init, {"one": jax.ShapeDtypeStruct((1,), jnp.float32)}), parts)
    if scheduled and "ScaleByScheduleState" in parts:
        raise BadSettings(
            "schedule= and an optimizer whose learning rate is a schedule of Optax: both would be applied. Give the "
            "optimizer a plain number, or leave out schedule="
        )
    return transformation, "+".join(parts) or "sgd"


def rate_of(model: Any, optimizer: Any, lr: float | None, transformation: optax.GradientTransformation) -> float | None:
    """The learning rate of an optimizer, if it is known: Optax hides it in functions."""
    state = jax.eval_shape(transformation.init, {"one": jax.ShapeDtypeStruct((1,), jnp.float32)})
    if hasattr(state, "hyperparams"):  # of optax.inject_hyperparams
        rate = transformation.init({"one": jnp.zeros(1)}).hyperparams.get("learning_rate")
        return None if rate is None else float(rate)
    if isinstance(optimizer, optax.GradientTransformation) or OPTIMIZERS.configured_by(model, lr):
        return None
    _, rate_option = OPTIMIZERS.maker(model, optimizer, lr)
    return next((float(rate) for rate in rate_option.values()), None)


def _state_names(state: Any, names: list[str]) -> None:
    """The names of all parts of an optimizer's state that hold something, as TraceState or ScaleByAdamState."""
    if not isinstance(state, tuple):
        return
    if hasattr(state, "_fields") and state._fields:
        names.append(type(state).__name__)
    for part in state:
        _state_names(part, names)
