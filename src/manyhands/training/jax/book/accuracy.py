"""How many predictions are right: see :mod:`manyhands.training.book.accuracy`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from manyhands.backends.jax import devices as _backend
from manyhands.device import Device
from manyhands.training.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.training.jax.skeleton import evaluating


class _Accuracy(Accuracy[jax.Device]):
    models = (nnx.Module,)
    model_name = "flax.nnx.Module"

    def count(self, y_hat: jax.Array, y: jax.Array) -> jax.Array:
        classes = y_hat.argmax(1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
        check_shapes(y_hat, classes, y)
        return (classes.reshape(y.shape).astype(y.dtype) == y).sum()

    def native(self, leaf: Any) -> jax.Array:
        return jnp.asarray(leaf)

    def homes(self, net: Any) -> list[jax.Device]:
        tensors = [tensor for _, tensor in _backend.model_tensors(net)] if isinstance(net, nnx.Module) else []
        return list(dict.fromkeys(device for tensor in tensors for device in tensor.devices()))

    def destination(self, net: Any, device: jax.Device | Device | str | None) -> jax.Device | None:
        """Samples of a net that is sharded over several devices stay where they are."""
        return None if device is None and len(self.homes(net)) > 1 else super().destination(net, device)

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[jax.Device | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        yield [_compiled(net, device if replicate else None) for device in devices]


def _compiled(net: Any, device: jax.Device | None) -> Predictor:
    """What the net answers: of a module a compiled function in evaluation mode, with its numbers on that device."""
    if not isinstance(net, nnx.Module):
        return net  # type: ignore[no-any-return]
    graph, state = nnx.split(net)
    if device is not None:
        state = jax.device_put(state, device)
    compiled = jax.jit(lambda state, X: evaluating(nnx.merge(graph, state))(X))
    return functools.partial(compiled, state)


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus
