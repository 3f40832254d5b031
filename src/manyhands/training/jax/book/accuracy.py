"""Figures of merit: how many predictions are right, on one device or on all.

Right answers are counted on the device, as whole numbers, and read once, at the end: the program never
waits for a device between two batches. Every sample counts once, whatever the sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from manyhands import tree
from manyhands.backends.jax import devices as _backend
from manyhands.device import Device
from manyhands.errors import BadBatch
from manyhands.placement.moves import Placement
from manyhands.training.book import accuracy_common
from manyhands.training.jax.skeleton import evaluating

Split = Callable[[Any, Any, Sequence[jax.Device]], tuple[Sequence[Any], Sequence[Any]]]

_place = Placement(_backend)


def accuracy(y_hat: Any, y: Any) -> float:
    """The number of predictions that are right.

    ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
    Reading the number waits for the device.
    """
    return float(_correct(jnp.asarray(y_hat), jnp.asarray(y)))


def _correct(y_hat: jax.Array, y: jax.Array) -> jax.Array:
    """The number of right predictions, left on the device."""
    classes = y_hat.argmax(1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
    if classes.size != y.size or classes.shape[:1] != y.shape[:1]:
        raise BadBatch(
            f"predictions of shape {y_hat.shape} and labels of shape {y.shape} do not belong together: give one row of "
            "scores, or one class number, per label"
        )
    return (classes.reshape(y.shape).astype(y.dtype) == y).sum()


def evaluate_accuracy_gpu(
    net: Callable[[Any], Any],
    data_iter: Iterable[tuple[Any, Any]],
    device: jax.Device | Device | str | None = None,
) -> float:
    """The part of all samples that the net gets right, on one device (where the net is, if none is named)."""
    native = _device_for(net, device)
    answer = _answering(net)
    counted, correct = 0, None
    for X, y in data_iter:
        if native is not None:
            X, y = _to(X, native), _to(y, native)
        now = _correct(answer(X), jnp.asarray(y))
        correct = now if correct is None else correct + now
        counted += accuracy_common.labels(y)
    return accuracy_common.part(0 if correct is None else int(correct), counted)


def evaluate_accuracy_gpus(
    net: nnx.Module, data_iter: Iterable[tuple[Any, Any]], split_f: Split | None = None
) -> float:
    """The part of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

    Each batch is split over the devices; ``split_f(X, y, devices)`` gives the shards of ``X`` and those of ``y``
    where it is to be done in another way. The net stays where it is: the devices work on copies.
    """
    accuracy_common.check_model(isinstance(net, nnx.Module), net, "flax.nnx.Module")
    split = split_f or functools.partial(accuracy_common.split, _place)
    devices = accuracy_common.all_gpus(_place)
    answers = [_answering(net, device) for device in devices]
    counted = 0
    sums: list[Any] = [0] * len(devices)  # then one array on each device
    for X, y in data_iter:
        X_shards, y_shards = split(_as_arrays(X), _as_arrays(y), devices)
        accuracy_common.check_whole(X_shards, y_shards, y, devices)
        for i, (X_shard, y_shard) in enumerate(zip(X_shards, y_shards, strict=True)):
            if accuracy_common.labels(y_shard):  # more devices than samples leave some without
                sums[i] = sums[i] + _correct(answers[i](X_shard), y_shard)
        counted += accuracy_common.labels(y)
    return accuracy_common.part(sum(map(int, sums)), counted)


def _answering(net: Any, device: jax.Device | None = None) -> Callable[[Any], Any]:
    """What the net answers: of a module a compiled function in evaluation mode, with its numbers on that device."""
    if not isinstance(net, nnx.Module):
        return net  # type: ignore[no-any-return]
    graph, state = nnx.split(net)
    if device is not None:
        state = jax.device_put(state, device)
    compiled = jax.jit(lambda state, X: evaluating(nnx.merge(graph, state))(X))
    return functools.partial(compiled, state)


def _device_for(net: object, device: jax.Device | Device | str | None) -> jax.Device | None:
    """Where the samples have to go; None leaves them where they are (a function without parameters)."""
    tensors = [tensor for _, tensor in _backend.model_tensors(net)] if isinstance(net, nnx.Module) else []
    on = list(dict.fromkeys(one for tensor in tensors for one in tensor.devices()))
    if device is None:
        return on[0] if len(on) == 1 else None
    return accuracy_common.destination(_place, on, device)


def _as_arrays(values: Any) -> Any:
    return tree.map_leaves(jnp.asarray, values)


def _to(values: Any, device: jax.Device) -> Any:
    return tree.map_leaves(lambda leaf: _place.to_leaf(leaf, device), _as_arrays(values))
