"""Figures of merit: how many predictions are right, on one device or on all.

Right answers are counted on the device, as whole numbers, and read once, at the end: the program never waits for a
device between two batches. Every sample counts once, whatever the sizes. A net of Keras's is worked with as a function
of its weights, which are copied once to where they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from manyhands import tree
from manyhands.backends.tensorflow import devices as _backend
from manyhands.backends.tensorflow.devices import TensorFlowDevice
from manyhands.device import Device
from manyhands.errors import BadBatch
from manyhands.placement.moves import Placement
from manyhands.training.book import accuracy_common

Split = Callable[[Any, Any, Sequence[TensorFlowDevice]], tuple[Sequence[Any], Sequence[Any]]]

_place = Placement(_backend)


def accuracy(y_hat: Any, y: Any) -> float:
    """The number of predictions that are right.

    ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
    Reading the number waits for the device.
    """
    return float(_correct(tf.convert_to_tensor(y_hat), tf.convert_to_tensor(y)))


def _correct(y_hat: Any, y: Any) -> Any:
    """The number of right predictions, left on the device."""
    with tf.device(_backend.device_of(y_hat)):
        classes = tf.argmax(y_hat, axis=1) if len(y_hat.shape) > 1 and y_hat.shape[1] > 1 else y_hat
        if accuracy_common.labels(classes) != accuracy_common.labels(y) or classes.shape[:1] != y.shape[:1]:
            raise BadBatch(
                f"predictions of shape {tuple(y_hat.shape)} and labels of shape {tuple(y.shape)} do not belong "
                "together: give one row of scores, or one class number, per label"
            )
        return tf.reduce_sum(tf.cast(tf.cast(tf.reshape(classes, y.shape), y.dtype) == y, tf.int64))


def evaluate_accuracy_gpu(
    net: Callable[[Any], Any],
    data_iter: Iterable[tuple[Any, Any]],
    device: TensorFlowDevice | Device | str | None = None,
) -> float:
    """The part of all samples that the net gets right, on one device (where the net is, if none is named)."""
    native = _home(net) if device is None else _place.existing(device)
    answer = _function(net, native)
    counted, correct = 0, None
    for X, y in data_iter:
        with tf.device(native):
            now = _correct(answer(_to(X, native)), _to(y, native))
            correct = now if correct is None else correct + now
        counted += accuracy_common.labels(y)
    return accuracy_common.part(0 if correct is None else int(correct), counted)


def evaluate_accuracy_gpus(net: Any, data_iter: Iterable[tuple[Any, Any]], split_f: Split | None = None) -> float:
    """The part of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

    Each batch is split over the devices; ``split_f(X, y, devices)`` gives the shards of ``X`` and those of ``y``
    where it is to be done in another way. The net stays where it is: the devices work on copies of its weights.
    """
    accuracy_common.check_model(isinstance(net, keras.Layer), net, "Keras model")
    split = split_f or functools.partial(accuracy_common.split, _place)
    devices = accuracy_common.all_gpus(_place)
    answers: list[Any] = []
    counted = 0
    sums: list[Any] = [0] * len(devices)  # then one tensor on each device
    for X, y in data_iter:
        if not answers:
            _build(net, X)
            answers = [_function(net, device) for device in devices]
        X, y = (tree.map_leaves(tf.convert_to_tensor, part) for part in (X, y))
        X_shards, y_shards = split(X, y, devices)
        accuracy_common.check_whole(X_shards, y_shards, y, devices)
        for i, device in enumerate(devices):
            if accuracy_common.labels(y_shards[i]):  # more devices than samples leave some without
                with tf.device(device):
                    sums[i] = sums[i] + _correct(answers[i](X_shards[i]), y_shards[i])
        counted += accuracy_common.labels(y)
    return accuracy_common.part(sum(map(int, sums)), counted)


def _function(net: Any, device: TensorFlowDevice) -> Callable[[Any], Any]:
    """The net in evaluation mode, with weights that are on the device."""
    if not isinstance(net, keras.Layer):
        return net  # type: ignore[no-any-return]
    if not net.built or all(_backend.is_on(tensor, device) for _, tensor in _backend.model_tensors(net)):
        return lambda X: net(X, training=False)
    with tf.device(device):
        own = [[tf.identity(v) for v in part] for part in (net.trainable_variables, net.non_trainable_variables)]
    return lambda X: net.stateless_call(*own, X, training=False)[0]


def _build(net: Any, X: Any) -> None:
    """Weights of a model that has seen no sample yet are made by one."""
    if not net.built:
        net(tree.map_leaves(lambda leaf: leaf[:1], X), training=False)


def _home(net: Any) -> TensorFlowDevice:
    """Where the net is, or else where TensorFlow puts things."""
    found = [tensor for _, tensor in _backend.model_tensors(net)] if isinstance(net, keras.Layer) else []
    return _backend.device_of(found[0] if found else tf.constant(0.0))


def _to(values: Any, device: TensorFlowDevice) -> Any:
    return tree.map_leaves(lambda leaf: _place.to_leaf(tf.convert_to_tensor(leaf), device), values)
