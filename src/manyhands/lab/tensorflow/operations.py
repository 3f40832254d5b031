"""What experiments need of TensorFlow (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from manyhands.backends.tensorflow.devices import cpu, device_of


def _where(x: Any) -> AbstractContextManager[Any]:
    """A device scope for the tensor's device: TensorFlow computes on the device of the scope, not of the tensors.

    Inside ``tf.function`` a value has no device yet; there the scope around the function decides.
    """
    return tf.device(device_of(x)) if tf.executing_eagerly() else nullcontext()


def _at_first_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, computed on the device of its first argument."""

    def compute(x: Any, *others: Any) -> Any:
        with _where(x):
            return function(x, *others)

    return compute


matmul, norm, relu, transpose = map(_at_first_argument, (tf.matmul, tf.norm, tf.nn.relu, tf.transpose))


def tensor(values: Any) -> Any:
    with tf.device(cpu()):
        return tf.constant(values)


def numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, (tf.Tensor, tf.Variable)) else value


def join(tensors: Sequence[Any]) -> Any:
    with _where(tensors[0]):
        return tf.concat([tf.reshape(x, [-1]) for x in tensors], axis=0)


def cut(joined: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    with _where(joined):
        parts = tf.split(joined, [math.prod(shape) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def number(x: Any, index: int) -> float:
    return float(x[0, index])


def with_number(x: Any, index: int, value: float) -> Any:
    with _where(x):
        return tf.tensor_scatter_nd_update(x, [[0, index]], [value])


def pin(x: Any) -> None:
    return None
