"""How many predictions are right: see :mod:`manyhands.training.book.accuracy`.

A net of Keras's is called as a function of its weights, which are copied once to where they are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from manyhands import tree
from manyhands.backends.tensorflow import devices as _backend
from manyhands.backends.tensorflow.devices import TensorFlowDevice
from manyhands.device import Device
from manyhands.training.book.accuracy import Accuracy, Predictor, check_shapes


class _Accuracy(Accuracy[TensorFlowDevice]):
    models = (keras.Layer,)
    model_name = "Keras model"

    def count(self, y_hat: Any, y: Any) -> Any:
        with tf.device(_backend.device_of(y_hat)):
            classes = tf.argmax(y_hat, axis=1) if len(y_hat.shape) > 1 and y_hat.shape[1] > 1 else y_hat
            check_shapes(y_hat, classes, y)
            return tf.reduce_sum(tf.cast(tf.cast(tf.reshape(classes, y.shape), y.dtype) == y, tf.int64))

    def native(self, leaf: Any) -> Any:
        return tf.convert_to_tensor(leaf)

    def on(self, device: TensorFlowDevice | None) -> AbstractContextManager[object]:
        return tf.device(device)  # type: ignore[no-any-return]

    def build(self, net: Any, X: Any) -> None:
        if not net.built:
            net(tree.map_leaves(lambda leaf: leaf[:1], X), training=False)

    def homes(self, net: Any) -> list[TensorFlowDevice]:
        """Where the net is, or else where TensorFlow puts things."""
        tensors = [tensor for _, tensor in _backend.model_tensors(net)] if isinstance(net, keras.Layer) else []
        return [_backend.device_of(tensors[0] if tensors else tf.constant(0.0))]

    def destination(self, net: Any, device: TensorFlowDevice | Device | str | None) -> TensorFlowDevice:
        """Any device will do: the net is called with copies of its weights there."""
        return self.homes(net)[0] if device is None else self.place.existing(device)

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[TensorFlowDevice | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        yield [_OnDevice(net, device) if isinstance(net, keras.Layer) else net for device in devices]


class _OnDevice:
    """The net in evaluation mode, with weights that are on the device: copied at the first call, if they are not."""

    def __init__(self, net: Any, device: TensorFlowDevice | None) -> None:
        self._net, self._device = net, device
        self._output: Predictor | None = None

    def __call__(self, X: Any) -> Any:
        if self._output is None:
            self._output = self._first()
        return self._output(X)

    def _first(self) -> Predictor:
        net, device = self._net, self._device
        assert device is not None
        if not net.built or all(_backend.is_on(tensor, device) for _, tensor in _backend.model_tensors(net)):
            return lambda X: net(X, training=False)
        with tf.device(device):
            copies = [[tf.identity(v) for v in part] for part in (net.trainable_variables, net.non_trainable_variables)]
        return lambda X: net.stateless_call(*copies, X, training=False)[0]


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus
