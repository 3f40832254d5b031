"""Figures of merit: how many predictions are right, on one device or on all.

Right answers are counted on the device and read once, at the end: the program never waits for a device between two
batches. Every sample counts once, whatever the sizes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd

from manyhands import tree
from manyhands.backends.mxnet import devices as _backend
from manyhands.device import Device
from manyhands.errors import BadBatch
from manyhands.placement.moves import Placement
from manyhands.training.book import accuracy_common
from manyhands.training.mxnet import modes, replicas

Split = Callable[[Any, Any, Sequence[mx.Context]], tuple[Sequence[Any], Sequence[Any]]]

_place = Placement(_backend)


def accuracy(y_hat: Any, y: Any) -> float:
    """The number of predictions that are right.

    ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
    Reading the number waits for the device.
    """
    return float(_correct(y_hat, y).asnumpy()[0])


def _correct(y_hat: Any, y: Any) -> Any:
    """The number of right predictions, left on the device; of length 1, for MXNet's older mode has no scalars."""
    with modes.numpy_like(), autograd.pause():
        scores, labels = y_hat.as_np_ndarray(), y.as_np_ndarray()
        classes = scores.argmax(axis=1) if scores.ndim > 1 and scores.shape[1] > 1 else scores
        if classes.size != labels.size or classes.shape[:1] != labels.shape[:1]:
            raise BadBatch(
                f"predictions of shape {tuple(y_hat.shape)} and labels of shape {tuple(y.shape)} do not belong "
                "together: give one row of scores, or one class number, per label"
            )
        # Sums of booleans are bytes on some devices: counted as floating-point numbers, exact far beyond any data set.
        return (classes.reshape(labels.shape).astype(labels.dtype) == labels).astype("float64").sum().reshape((1,))


def right_answers(answer: Any, target: Any, *, anyhow: bool = False) -> Any | None:
    """How many rows of class scores have their largest at the target; None where that has no meaning.

    Targets that are floating-point numbers have none, unless they are known to be classes (``anyhow``).
    """
    if not (_backend.is_tensor(answer) and _backend.is_tensor(target)):
        return None
    if len(answer.shape) != 2 or len(target.shape) != 1:
        return None
    return _correct(answer, target) if anyhow or "int" in str(target.dtype) else None


def evaluate_accuracy_gpu(
    net: Callable[[Any], Any], data_iter: Iterable[tuple[Any, Any]], device: mx.Context | Device | str | None = None
) -> float:
    """The part of all samples that the net gets right, on one device (where the net is, if none is named)."""
    native = _device_for(net, device)
    counted, correct = 0, None
    with modes.numpy_like(modes.of_model(net)) if _backend.is_model(net) else contextlib.nullcontext():
        for X, y in data_iter:
            if native is not None:
                X, y = _to(X, native), _to(y, native)
            now = _correct(net(X), y)
            correct = now if correct is None else correct + now
            counted += y.size
    return accuracy_common.part(0 if correct is None else int(correct.asnumpy()[0]), counted)


def evaluate_accuracy_gpus(net: Any, data_iter: Iterable[tuple[Any, Any]], split_f: Split | None = None) -> float:
    """The part of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

    Each batch is split over the devices; ``split_f(X, y, devices)`` gives the shards of ``X`` and those of ``y``
    where it is to be done in another way. Meanwhile the net has a replica on each device.
    """
    accuracy_common.check_model(_backend.is_model(net), net, "gluon.Block")
    split = split_f or functools.partial(accuracy_common.split, _place)
    devices = accuracy_common.all_gpus(_place)
    counted = 0
    sums: list[Any] = [None] * len(devices)  # then one number on each device
    with replicas.on(net, devices):
        for X, y in data_iter:
            X_shards, y_shards = split(X, y, devices)
            accuracy_common.check_whole(X_shards, y_shards, y, devices)
            for i, (X_shard, y_shard) in enumerate(zip(X_shards, y_shards, strict=True)):
                if y_shard.size:  # more devices than samples leave some without
                    now = _correct(net(X_shard), y_shard)
                    sums[i] = now if sums[i] is None else sums[i] + now
            counted += y.size
        return accuracy_common.part(sum(int(one.asnumpy()[0]) for one in sums if one is not None), counted)


def _device_for(net: object, device: mx.Context | Device | str | None) -> mx.Context | None:
    """Where the samples have to go; None leaves them where they are (a function without parameters)."""
    tensors = [tensor for _, tensor in _backend.model_tensors(net)] if _backend.is_model(net) else []
    on = list(dict.fromkeys(tensor.ctx for tensor in tensors))
    if device is None:
        return on[0] if on else None
    return accuracy_common.destination(_place, on, device)


def _to(values: Any, device: mx.Context) -> Any:
    return tree.map_leaves(lambda leaf: _place.to_leaf(leaf, device), values)
