"""Splits a model into its structure and its arrays: JAX computes on trees of arrays, users hold Flax NNX objects.

A :class:`Skeleton` is the model without its numbers. They come in three trees, plain nested dicts under the names of
the model's parts: ``parameters`` (what is trained), ``random`` (streams of random numbers, as raw keys and counts) and
``rest`` (statistics of normalisation, and every other variable). Inside a step the three become a model again, for as
long as it is traced::

    skeleton = Skeleton(net)
    numbers = skeleton.numbers(net)     # {"parameters": {"layers": {0: {"kernel": ...}}}, "random": {}, "rest": {}}
    net = skeleton.model(numbers)       # another object, with those numbers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from manyhands.errors import BadSettings
from manyhands.training import refusals
from manyhands.training.jax import linen

Tree = dict[Any, Any]  # nested, with arrays as leaves
Numbers = dict[str, Tree]

PARTS = ("parameters", "random", "rest")
_MODES = ("deterministic", "use_running_average")
_WRT = "give a filter of NNX's, as nnx.LoRAParam, nnx.PathContains('adapter') or a function of (path, variable)"


class Skeleton:
    """What a model is made of, apart from its numbers.

    ``wrt``: which of its variables are trained, a filter of NNX's; None: all parameters. Those that are not trained are
    part of the rest.
    """

    def __init__(self, model: nnx.Module, wrt: Any = None) -> None:
        if not isinstance(model, nnx.Module):
            advice = f" ({linen.HOW} makes one of this Linen module)" if linen.is_linen(model) else ""
            raise refusals.not_a_model(model, f"a flax.nnx.Module{advice}")
        self._filters = (nnx.Param if wrt is None else _filter(wrt), nnx.RngState, ...)
        self._graph, *states = nnx.split(model, *self._filters)
        self._states = dict(zip(PARTS, states, strict=True))
        self._keys = {path: key for path, key in _leaves(self._pure("random")) if is_key(key)}
        layers = [layer for _, layer in nnx.iter_modules(model)]
        modes = [getattr(layer, name) for layer in layers for name in _MODES if hasattr(layer, name)]
        self.all_evaluating = bool(modes) and all(modes)
        if wrt is not None:
            _check_wrt(model, wrt, self._pure("parameters"))
        if not jax.tree.leaves(self._pure("parameters")):
            is_lazy = isinstance(model, nnx.bridge.ToNNX)
            cure = f"initialise it, {linen.HOW}" if is_lazy else "its weights have to be nnx.Param"
            raise refusals.nothing_to_train(model, cure)

    def numbers(self, model: nnx.Module) -> Numbers:
        """All numbers of a model of this kind; variables that a call has added to it are left out."""
        _, *states = nnx.split(model, *self._filters)
        numbers = {part: nnx.to_pure_dict(state) for part, state in zip(PARTS, states, strict=True)}
        numbers = {part: _only(tree, self._pure(part)) for part, tree in numbers.items()}
        numbers["random"] = jax.tree.map(raw_key, numbers["random"])
        return numbers

    def model(self, numbers: Numbers) -> nnx.Module:
        """A new model with those numbers."""
        return nnx.merge(self._graph, *(self._fill(part, numbers[part]) for part in PARTS))

    def put_into(self, model: nnx.Module, numbers: Numbers) -> None:
        """Give those numbers to a model of this kind, in place."""
        nnx.update(model, *(self._fill(part, numbers[part]) for part in PARTS))

    def _pure(self, part: str) -> Tree:
        pure: Tree = nnx.to_pure_dict(self._states[part])
        return pure

    def _fill(self, part: str, tree: Tree) -> Any:
        if part == "random":
            tree = jax.tree_util.tree_map_with_path(self._as_key, tree)
        state = jax.tree.map(lambda leaf: leaf, self._states[part])  # a new one: it is written to
        nnx.replace_by_pure_dict(state, tree)
        return state

    def _as_key(self, path: Any, leaf: Any) -> Any:
        key = self._keys.get(name_of(path))
        return leaf if key is None else jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(key))


def _filter(wrt: Any) -> Any:
    try:
        return nnx.All(wrt, nnx.Not(nnx.RngState))
    except TypeError as error:
        raise BadSettings(f"Step(wrt={wrt!r}): {_WRT}") from error


def _check_wrt(model: nnx.Module, wrt: Any, trained: Tree) -> None:
    """Refuse a filter that trains nothing, or what has no gradient."""
    if not jax.tree.leaves(trained):
        kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(nnx.state(model))})
        raise BadSettings(f"Step(wrt={wrt!r}) picks no variable of the model, which has {', '.join(kinds)}: {_WRT}")
    for name, leaf in _leaves(trained):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise BadSettings(f"Step(wrt={wrt!r}) picks {name}, which holds {leaf.dtype} and has no gradient: {_WRT}")


def refill(tree: Any, values: Mapping[str, Any]) -> Any:
    """A tree of the same structure, filled with values by the names of its leaves."""
    return jax.tree_util.tree_map_with_path(lambda path, _: values[name_of(path)], tree)


def to_double(model: nnx.Module) -> None:
    """Turn all floating-point numbers of a model into double precision; inside ``jax.enable_x64`` only."""

    def wide(leaf: Any) -> Any:
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    nnx.update(model, jax.tree.map(wide, nnx.state(model)))


def name_of(path: Any) -> str:
    """``layers.0.kernel``: the name under which a leaf is known and saved."""
    return str(jax.tree_util.keystr(path, simple=True, separator="."))


def by_name(tree: Any) -> dict[str, Any]:
    """A tree's leaves by name."""
    return dict(_leaves(tree))


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw_key(leaf: Any) -> Any:
    """The numbers of a key of random numbers; anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _only(tree: Tree, like: Tree) -> Tree:
    return {name: _only(tree[name], part) if isinstance(part, dict) else tree[name] for name, part in like.items()}


# Modes and precision, of models that live for one trace


def for_training(model: nnx.Module, skeleton: Skeleton) -> nnx.Module:
    """The model in training mode; layers that the caller has frozen stay in evaluation mode, unless all of them are."""
    if skeleton.all_evaluating:
        model.train()
    for _, layer in nnx.iter_modules(model):
        if getattr(layer, "deterministic", False) is None:  # the default of nnx.MultiHeadAttention
            layer.deterministic = False
    linen.in_mode(model, training=True)
    return model


def for_evaluation(model: nnx.Module) -> nnx.Module:
    """In evaluation mode: no dropout, and statistics as they were learned."""
    model.eval()
    linen.in_mode(model, training=False)
    return model


def computing_in(model: nnx.Module, dtype: Any, *, statistics: bool) -> nnx.Module:
    """Let every layer that does not say itself in which precision it computes do so in this one.

    ``statistics=False`` leaves normalisation alone: it would round what it has learned before it uses it. An
    ``nnx.Embed`` always says a precision, by default that of its parameters.
    """
    open_kinds = (None, jnp.float32) if dtype == jnp.float64 else (None,)
    for _, layer in nnx.iter_modules(model):
        normalises = isinstance(layer, nnx.BatchNorm)
        if getattr(layer, "dtype", dtype) in open_kinds and (statistics or not normalises):
            layer.dtype = dtype
    return model
