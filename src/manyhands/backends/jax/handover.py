"""``parallel(fn)`` in JAX: ``jax.jit``, for which every value that is no array is a constant of the trace.

``jax.jit`` itself refuses strings, traces numbers and returns them as arrays. Here they stay what they are, as they do
in the other frameworks: a call with another number is traced again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from manyhands.backends.jax import tasks as tasks

name = "jax"
RUN_AS = "jax.jit"
SCHEDULER = "XLA fuses the operations and decides their order"
PROFILER = "jax.profiler.trace(folder)"


@jax.tree_util.register_static
class _Constant:
    """A value that is part of a trace's key: equal to others of its type that are equal, or that are the same one."""

    def __init__(self, value: Any) -> None:
        self.value = value
        kind: Any = type(value)
        if isinstance(value, (float, complex, np.generic)):
            value = repr(value)  # NaN is itself, -0.0 is not 0.0
        self._key = (kind, value if kind.__hash__ else id(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _wrapped(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else _Constant(leaf)


def _unwrapped(tree: Any) -> Any:
    def value(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, _Constant) else leaf

    return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, _Constant))


def hand_over(function: Callable[..., Any]) -> Callable[..., Any]:
    def traced(arguments: Any, keywords: Any) -> Any:
        return jax.tree.map(_wrapped, function(*_unwrapped(arguments), **_unwrapped(keywords)))

    compiled = jax.jit(functools.wraps(function, updated=())(traced))
    return lambda *arguments, **keywords: _unwrapped(compiled(*jax.tree.map(_wrapped, (arguments, keywords))))
