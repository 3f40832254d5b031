"""The few functions that experiments need from every framework; each computes on the device of its first argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Operations:
    """One name for each function in every framework.

    ``tensor`` takes a NumPy array and gives a tensor on the host. ``with_number(x, index, value)`` sets a number in row
    0. ``pin`` copies to page-locked memory of the host, or gives None if the framework has no such memory.
    """

    matmul: Callable[[Any, Any], Any]
    norm: Callable[[Any], Any]
    transpose: Callable[[Any], Any]
    tensor: Callable[[Any], Any]
    with_number: Callable[[Any, int, float], Any]
    pin: Callable[[Any], Any] = lambda x: None


def operations_of(framework: str) -> Operations:
    return {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow, "mxnet": _mxnet}[framework]()


def _set(x: Any, index: int, value: float) -> Any:
    x[0, index] = value
    return x


def _torch() -> Operations:
    import torch

    from manyhands.backends.torch.devices import matmul

    return Operations(matmul, torch.linalg.vector_norm, torch.t, torch.from_numpy, _set, torch.Tensor.pin_memory)


def _jax() -> Operations:
    import jax
    import jax.numpy as jnp

    from manyhands.backends.jax.devices import matmul

    def tensor(values: Any) -> Any:
        return jax.device_put(values, jax.devices("cpu")[0])

    def with_number(x: Any, index: int, value: float) -> Any:
        return x.at[0, index].set(value)

    return Operations(matmul, jnp.linalg.norm, jnp.transpose, tensor, with_number)


def _tensorflow() -> Operations:
    import tensorflow as tf

    from manyhands.backends.tensorflow.devices import cpu, device_of

    def there(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function on its first argument's device: TensorFlow computes on the device of the scope.

        Inside ``tf.function`` a value has no device yet; there the scope around the function decides.
        """

        def compute(x: Any, *others: Any) -> Any:
            if not tf.executing_eagerly():
                return function(x, *others)
            with tf.device(device_of(x)):
                return function(x, *others)

        return compute

    def tensor(values: Any) -> Any:
        with tf.device(cpu()):
            return tf.constant(values)

    def with_number(x: Any, index: int, value: float) -> Any:
        return tf.tensor_scatter_nd_update(x, [[0, index]], [value])

    matmul, norm, transpose = map(there, (tf.matmul, tf.norm, tf.transpose))
    return Operations(matmul, norm, transpose, tensor, there(with_number))


def _mxnet() -> Operations:
    import mxnet as mx

    from manyhands.backends.mxnet.devices import matmul

    def tensor(values: Any) -> Any:
        return mx.nd.array(values, ctx=mx.cpu(), dtype=values.dtype)

    def pin(x: Any) -> Any:
        return x.as_in_context(mx.cpu_pinned(0))

    return Operations(matmul, mx.nd.norm, mx.nd.transpose, tensor, _set, pin)
