"""What experiments need of TensorFlow (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from manyhands.backends.tensorflow.devices import cpu, device_of
from manyhands.backends.tensorflow.devices import matmul as matmul


def tensor(values: Any) -> Any:
    with tf.device(cpu()):
        return tf.constant(values)


def numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, (tf.Tensor, tf.Variable)) else value


def norm(x: Any) -> Any:
    with tf.device(device_of(x)):  # TensorFlow computes where the block says, not where the tensor is
        return tf.norm(x)


def relu(x: Any) -> Any:
    with tf.device(device_of(x)):
        return tf.nn.relu(x)
