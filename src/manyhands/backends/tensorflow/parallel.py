"""What ``mh.parallel`` needs of TensorFlow: functions are handed to ``tf.function``; and answers for explicit tasks.

Without AutoGraph, which would replace the type of many errors that the function raises: a branch on a tensor's value is
an error, as in ``jax.jit``.

Explicit tasks (:mod:`manyhands.tasks.scope`) ask about variables, layers and the scope of a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record

from manyhands.addresses import Held
from manyhands.backends.tensorflow import devices as adapter

name = "tensorflow"
RUN_AS = "tf.function"
SCHEDULER = "TensorFlow optimizes the graph, and its inter-op threads run what is ready"
PROFILER = "tf.profiler.experimental"


def hand_over(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, autograph=False)  # type: ignore[no-any-return]


# Explicit tasks


def memory_of(value: Any) -> int:
    """Tensors never change; a variable is known by the resource behind it, a Keras variable by the one in it."""
    variable = variable_of(value)
    return id(value if variable is None else variable.handle)


def variable_of(value: Any) -> Any:
    """The value as a ``tf.Variable``, or None; a mirrored variable is several, and counts as none."""
    if adapter._is_keras(value, "Variable"):
        value = value.value
    is_one = isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)
    return value if is_one else None


def parts_of(value: Any) -> Sequence[Any] | None:
    """What is read and written with an object.

    A module or a layer has its variables and attributes and those of the layers in it; an optimizer the weights that it
    moves and its notes about them; a metric its counts.
    """
    if isinstance(value, tf.Tensor) or variable_of(value) is not None:
        return ()
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values  # type: ignore[no-any-return]
    if adapter._is_keras(value, "Variable"):
        return (value.value,)
    if isinstance(value, tf.types.experimental.ConcreteFunction):
        return value.variables  # type: ignore[no-any-return]
    if adapter._is_keras(value, "Optimizer"):
        return [*value.variables, *value._trainable_variables]
    if adapter._is_keras(value, "Metric"):
        return [*value.variables]
    layers = layers_of(value)
    return [*value.variables, *(part for layer in layers for part in _attributes(layer))] if layers else None


def layers_of(value: Any) -> list[Any]:
    """A module or layer, and those in it; nothing for anything else."""
    if adapter._is_keras(value, "Layer"):
        return [*value._flatten_layers()]
    return [value, *value.submodules] if isinstance(value, tf.Module) else []


def _attributes(layer: Any) -> list[Any]:
    """The attributes of a user's layer besides its variables."""
    if type(layer).__module__.partition(".")[0] in ("keras", "tensorflow"):
        return []
    return [value for name, value in vars(layer).items() if not name.startswith("_")]


def version_of(value: Any) -> Any:
    """A variable by its value, a module or a layer by its variables and attributes."""
    if (variable := variable_of(value)) is not None:
        return _Value(variable)
    return Held([*(parts_of(value) or ())]) if layers_of(value) else None


class _Value:
    """The value of a variable. TensorFlow does not overwrite it while it is kept: a new value goes elsewhere.

    So it is enough to compare addresses. Contents are compared only where TensorFlow reads from a copy (after the first
    sparse update, or on a GPU).
    """

    __slots__ = ("_tensor",)

    def __init__(self, variable: tf.Variable) -> None:
        with _record.stop_recording():
            self._tensor = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        place = self._place()
        return (place is not None and place == other._place()) or self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _place(self) -> int | None:
        try:
            return int(np.asarray(memoryview(self._tensor)).__array_interface__["data"][0])
        except (TypeError, ValueError, BufferError):  # a dtype that Python's buffers do not have
            return None

    def _content(self) -> Any:
        content = np.asarray(self._tensor.numpy())
        return content.shape, content.tolist() if content.dtype.hasobject else content.tobytes()


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """``with tf.device(...)`` belongs to a thread: a task gets that of the thread that submits it."""
    device = _context.context().device_name or None

    def run(*arguments: Any, **keywords: Any) -> Any:
        with tf.device(device):
            return function(*arguments, **keywords)

    return run
