"""What ``mh.parallel`` needs of JAX: functions are handed to ``jax.jit``; and the answers for explicit tasks.

``jax.jit`` itself refuses strings, traces numbers and returns them as arrays. Here every value that is no array is a
constant of the trace and stays what it is, as in the other frameworks: a call with another number is traced again.

Explicit tasks (:mod:`manyhands.tasks.scope`) ask about Flax's objects and the settings of a thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from manyhands.backends.jax import devices as adapter

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


def _wrap(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else _Constant(leaf)


def _unwrap(tree: Any) -> Any:
    def value(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, _Constant) else leaf

    return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, _Constant))


def hand_over(function: Callable[..., Any]) -> Callable[..., Any]:
    def trace(arguments: Any, keywords: Any) -> Any:
        return jax.tree.map(_wrap, function(*_unwrap(arguments), **_unwrap(keywords)))

    compiled = jax.jit(functools.wraps(function, updated=())(trace))
    return lambda *arguments, **keywords: _unwrap(compiled(*jax.tree.map(_wrap, (arguments, keywords))))


# Explicit tasks

memory_of = id  # arrays are immutable, so it does not matter which share memory
_ARRAYS = (jax.Array, np.ndarray)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, type, np.generic, np.dtype)
_REFERENCES: Any = getattr(jax, "Ref", ())


def parts_of(value: Any) -> Sequence[Any] | None:
    """What is read and written with an object of Flax: with a variable its value, with a module its attributes."""
    if isinstance(value, (jax.Array, _REFERENCES)):
        return ()
    if not is_nnx(value):
        return None
    return (value.get_raw_value(),) if is_variable(value) else [*_attributes(value).values()]


def _nnx_classes() -> tuple[type, ...]:
    nnx = sys.modules.get("flax.nnx")
    return (nnx.Pytree, nnx.Variable) if nnx is not None and hasattr(nnx, "Pytree") else ()


def is_nnx(value: Any) -> bool:
    return isinstance(value, _nnx_classes())


def is_module(value: Any) -> bool:
    return isinstance(value, _nnx_classes()[:1])


def is_variable(value: Any) -> bool:
    return isinstance(value, _nnx_classes()[1:])


def _attributes(module: Any) -> dict[str, Any]:
    return {word: value for word, value in vars(module).items() if not word.startswith("_pytree__")}


def version_of(value: Any) -> Any:
    """A Flax variable by its value, a user's module by its attributes, a reference by its content."""
    if isinstance(value, _REFERENCES):
        return np.asarray(value[...]).tobytes()
    if not is_nnx(value):
        return None
    if is_variable(value):
        return Value(value.get_raw_value())
    # nnx.jit writes the attributes of Flax's own modules back as they were.
    if type(value).__module__.startswith("flax."):
        return None
    return _content(value, ())


def _content(value: Any, above: tuple[int, ...]) -> Any:
    """A module by its attributes, a variable by its value; ``above``: the modules that this one is in."""
    if is_variable(value):
        return Value(value.get_raw_value())
    if not is_nnx(value):
        return Value(value)
    inside = {} if id(value) in above else _attributes(value)
    return type(value), {word: _content(part, (*above, id(value))) for word, part in inside.items()}


def exclusive(objects: list[Any]) -> list[Any]:
    """Flax modules: ``nnx.jit`` and its like take the attributes out of a module, and put them back."""
    return [value for value in objects if is_module(value)]


class Value:
    """The value of a variable; an array that was written back as it was is the same one (``nnx.jit`` does that)."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value) or self._value is other._value:
            return isinstance(other, Value)
        if not isinstance(self._value, _ARRAYS) or not isinstance(other._value, _ARRAYS):
            same_kind = type(self._value) is type(other._value) and isinstance(self._value, (*_PLAIN, tuple))
            return bool(same_kind and self._value == other._value)
        one, two = (np.asarray(adapter.without_key(array)) for array in (self._value, other._value))
        return (one.shape, one.dtype, one.tobytes()) == (two.shape, two.dtype, two.tobytes())

    __hash__ = None  # type: ignore[assignment]


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's settings in ``with`` belong to a thread: a task gets those of the thread that submits it."""
    device, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision
    wide = bool(jax.config.jax_enable_x64)

    def run(*arguments: Any, **keywords: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(jax.default_device(device))
            stack.enter_context(jax.default_matmul_precision(precision))
            stack.enter_context(jax.enable_x64(wide))
            return function(*arguments, **keywords)

    return run
