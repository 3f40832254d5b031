"""Makes the optimizer of a job; :mod:`manyhands.training.optimizers` says whose learning rate counts."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from manyhands.errors import BadSettings
from manyhands.training.jax.skeleton import is_key, raw_key
from manyhands.training.optimizers import Optimizers

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
# Optimizers, by a part of their state, whose updates are not proportional to a rate.
_NOT_PROPORTIONAL = {
    "ScaleByScheduleState": "has a learning rate that is a schedule already",
    "SAMState": "goes to another place and back (sam)",
    "LookaheadState": "goes back to slow weights (lookahead)",
    "ScheduleFreeState": "averages the weights itself (schedule_free)",
}


def _by_name() -> dict[str, Any]:
    functions = {name: function for name, function in vars(optax).items() if inspect.isfunction(function)}
    return {
        name: function
        for name, function in functions.items()
        if next(iter(inspect.signature(function).parameters), "") == "learning_rate"
        and not name.startswith(("_", "scale_by"))
    }


OPTIMIZERS = Optimizers(
    where="optax",
    example="optax.adamw",
    finished=(optax.GradientTransformation,),
    by_name=_by_name,
    sgd=optax.sgd,
    rate="learning_rate",
    of_parameters=False,
)


def check(optimizer: Any, lr: Any) -> None:
    """Refuse what is not an Optax optimizer; for a wrapper, name the optimizer inside."""
    if isinstance(optimizer, nnx.Optimizer):
        raise BadSettings("an nnx.Optimizer holds one model's state: give the Optax optimizer inside it, its .tx")
    if isinstance(optimizer, optax.MultiSteps):
        raise BadSettings("optax.MultiSteps wraps an optimizer and is none itself: give its .gradient_transformation()")
    OPTIMIZERS.check(optimizer, lr)


def optimizer_for(
    model: Any, optimizer: Any, lr: float | None, parameters: Any, *, scheduled: bool
) -> tuple[Optimizer, str]:
    """The optimizer of these parameters, and a name for it: Optax has no names, so the parts of its state make one."""
    if OPTIMIZERS.configured_by(model, optimizer, lr):
        optimizer = model.configure_optimizers()
        check(optimizer, None)
    is_finished = isinstance(optimizer, optax.GradientTransformation)
    transformation = optimizer if is_finished else OPTIMIZERS.create(model, optimizer, lr)
    parts: list[str] = []
    _state_names(jax.eval_shape(transformation.init, parameters), parts)
    for part, what in _NOT_PROPORTIONAL.items():
        if scheduled and part in parts:
            cure = "leave out schedule=, and give the optimizer a schedule of Optax"
            raise BadSettings(f"schedule= multiplies every update, and the optimizer {what}: {cure}")
    return _adapt(transformation, parameters), "+".join(parts) or "sgd"


def _adapt(transformation: optax.GradientTransformation, parameters: Any) -> Optimizer:
    """The optimizer, given the loss as ``value`` if it takes that.

    Keys of random numbers in its state are plain numbers, which can be copied and saved.
    """
    optimizer = optax.with_extra_args_support(transformation)
    takes_value = _takes_value(optimizer, parameters)
    kinds: list[Any] = []  # for each leaf of the state: which kind of key it is, or None

    def init(parameters: Any) -> Any:
        leaves, structure = jax.tree.flatten(optimizer.init(parameters))
        kinds[:] = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]
        return jax.tree.unflatten(structure, map(raw_key, leaves))

    def update(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        leaves, structure = jax.tree.flatten(state)
        typed = [
            leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        extra = {"value": value} if takes_value else {}
        updates, after = optimizer.update(updates, jax.tree.unflatten(structure, typed), params, **extra)
        return updates, jax.tree.map(raw_key, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _takes_value(optimizer: Optimizer, parameters: Any) -> bool:
    """Whether the optimizer takes the loss; refused if it needs something else besides gradients and parameters."""

    def update(parameters: Any, *names: str) -> Any:
        extra = {name: jnp.zeros(()) for name in names}
        return optimizer.update(parameters, optimizer.init(parameters), parameters, **extra)

    try:
        jax.eval_shape(lambda parameters: update(parameters, "value"), parameters)
        return True
    except (TypeError, ValueError):
        pass
    try:
        jax.eval_shape(update, parameters)
        return False
    except (TypeError, ValueError) as error:
        raise BadSettings(
            "an optimizer is given the gradients of a batch, the parameters and the loss (value=), and this one asks "
            f"for more ({error}): give optax.lbfgs(0.1, linesearch=None), or optax.contrib.sam(...) without opaque_mode"
        ) from error


def rate_of(model: Any, optimizer: Any, lr: float | None, transformation: Optimizer, parameters: Any) -> float | None:
    """The learning rate of an optimizer, if it is known: Optax hides it in functions."""
    if hasattr(jax.eval_shape(transformation.init, parameters), "hyperparams"):  # of optax.inject_hyperparams
        options = jax.jit(lambda parameters: transformation.init(parameters).hyperparams)(parameters)
        return float(options["learning_rate"]) if "learning_rate" in options else None
    if isinstance(optimizer, optax.GradientTransformation) or OPTIMIZERS.configured_by(model, optimizer, lr):
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
