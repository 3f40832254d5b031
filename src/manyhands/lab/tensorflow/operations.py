"""What experiments need of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
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


def with_number(x: Any, index: int, value: float) -> Any:
    with _where(x):
        return tf.tensor_scatter_nd_update(x, [[0, index]], [value])


# A copy in page-locked memory of the host; None if the framework has no such memory.
def pin(x: Any) -> None:
    return None
