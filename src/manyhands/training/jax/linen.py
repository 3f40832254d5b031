"""Linen modules as NNX modules, made by ``nnx.bridge.ToNNX``, and back.

A Linen module holds no weights. ``trainer.fit(module, data)`` draws them from the job's seed, or begins with those of a
bound module, ``module.bind(variables)``; afterwards ``trainer.model`` is the module bound to the trained weights.

A Linen module does not know whether it is trained: every call says so, by an argument that its author has named, and
its statistics change only if the caller allows it. NNX's ``train()`` and ``eval()`` do not reach it. So, in a model
that lives for one trace, these modules get a class that adds both to each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen, nnx
from flax.core import meta
from flax.nnx.bridge import variables as bridge_variables

from manyhands.errors import BadSettings

HOW = "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X[:1])"
_TRAINING = ("train", "training", "is_training")
_EVALUATING = ("deterministic", "use_running_average", "eval")
_SOWN = "losses"  # the collection of self.sow("losses", name, value)


def is_linen(model: object) -> bool:
    return isinstance(model, linen.Module)


def variables_of(module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], seed: int) -> Any:
    """The variables of a bound Linen module, or new ones for such inputs, by position and by name."""
    if module.scope is not None:
        return _plain(module.variables)
    parameters = inspect.signature(type(module).__call__).parameters
    mode = {name: name in _EVALUATING for name in (*_TRAINING, *_EVALUATING) if name in parameters}
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(seed)), strict=True))
    return _plain(module.init(keys, *inputs, **named, **mode))


def as_nnx(module: Any, variables: Any, seed: int) -> Any:
    """An NNX module with these variables.

    Linen's names of axes (``nn.with_partitioning``) are left out: NNX would look for a mesh that has them.
    """
    if module.scope is not None:
        module, _ = module.unbind()
    wrapped = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(seed))
    for name, value in bridge_variables.linen_vars_to_nnx_attrs(meta.unbox(variables)).items():
        setattr(wrapped, name, nnx.data(value))
    return wrapped


def with_weights(model: Any) -> Any:
    """The model as an NNX module that can be evaluated; of a Linen module one that is bound to its variables."""
    if not is_linen(model):
        return model
    if model.scope is None:
        name = type(model).__name__
        raise BadSettings(f"the Linen module {name} holds no weights: give trainer.model, or module.bind(variables)")
    return as_nnx(model, _plain(model.variables), 0)


def as_linen(wrapped: Any, variables: Any) -> Any:
    """The Linen module, bound to the variables of the NNX module that was made of it and of these variables."""
    attributes = {
        name: value for name, value in vars(wrapped).items() if not name.startswith(("to_nnx__", "_pytree__"))
    }
    trained = _plain(bridge_variables.nnx_attrs_to_linen_vars(attributes))
    return wrapped.to_nnx__module.bind(meta.replace_boxed(variables, trained))


def _plain(variables: Any) -> Any:
    """Dicts: a bound module may have frozen ones."""
    return {name: _plain(value) for name, value in variables.items()} if isinstance(variables, Mapping) else variables


def in_mode(model: nnx.Module, *, training: bool) -> None:
    """Set the mode of every Linen module in the model; an argument of the call overrides it."""
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.bridge.ToNNX):
            object.__setattr__(layer, "__class__", _with_mode(layer, training=training))
            nnx.pop(layer, nnx.variable_type_from_name(_SOWN, allow_register=True))  # sow would add to them


def sown_losses(model: nnx.Module, *, in_parts: bool) -> Any:
    """The sum of what Linen modules have sown as ``"losses"`` in their calls: terms of the loss.

    ``in_parts``: the batch is processed in micro-batches, and a term need not be a mean over samples.
    """
    sown = jax.tree.leaves(nnx.state(model, nnx.variable_type_from_name(_SOWN, allow_register=True)))
    if sown and in_parts:
        raise BadSettings(
            f"sow({_SOWN!r}, ...) and accumulate: whether the term adds up from micro-batches is not known. Leave out "
            "accumulate, or let __call__ return the term, and add it in loss=, a function of the output and the target"
        )
    return sum(leaf.sum() for leaf in sown)


def _with_mode(layer: Any, *, training: bool) -> Any:
    parameters = inspect.signature(type(layer.to_nnx__module).__call__).parameters
    mode = {name: training for name in _TRAINING if name in parameters}
    mode |= {name: not training for name in _EVALUATING if name in parameters}
    changing = _collections(layer)
    if set(changing) - {_SOWN} and not mode:
        raise BadSettings(
            f"the Linen module {type(layer.to_nnx__module).__name__} keeps {', '.join(changing)}, and its __call__ has "
            "no argument that says whether it is trained: give it one, __call__(self, x, train: bool = False), and "
            "write nn.BatchNorm(use_running_average=not train)"
        )
    kind = nnx.bridge.ToNNX

    def call(self: Any, *arguments: Any, method: Any = None, mutable: Any = None, **others: Any) -> Any:
        if method is None:
            names = list(parameters)[1 : 1 + len(arguments)]
            others = {**{name: value for name, value in mode.items() if name not in names}, **others}
        if mutable is None and training:
            mutable = changing or False
        return kind.__call__(self, *arguments, method=method, mutable=mutable, **others)

    return type(kind.__name__, (kind,), {"__call__": call})


def _collections(layer: Any) -> list[str]:
    """Linen's names for the kinds of variables that a step changes: all but parameters and random numbers."""
    _, _, rest = nnx.state(layer, nnx.Param, nnx.RngState, ...)
    kinds = {type(variable) for _, variable in nnx.to_flat_state(rest)}
    return sorted(nnx.variable_name_from_type(kind) for kind in kinds)
