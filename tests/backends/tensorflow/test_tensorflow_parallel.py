"""``parallel`` in TensorFlow: ``tf.function`` with its contract, variables, Keras, scopes of a device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow.python", reason="TensorFlow is not installed")

import keras
import numpy as np
import tensorflow as tf

from manyhands import tensorflow as mh


def test_variables_are_read_at_every_call() -> None:
    weight = tf.Variable(1.0)
    fast = mh.parallel(lambda x: x * weight)
    for number in (1.0, 5.0):
        weight.assign(number)
        assert fast(tf.ones(2)).numpy().tolist() == [number] * 2


def test_keras_models_with_dropout_and_statistics() -> None:
    def net() -> Any:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()])
        made.build((None, 3))
        return made

    one, other = net(), net()
    fast, x = mh.parallel(lambda x: one(x, training=True)), tf.ones((8, 3))
    for _ in range(4):
        assert np.allclose(fast(x), other(x, training=True), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        assert np.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    whole = mh.parallel(one)
    assert np.allclose(whole(x), one(x))
    one.layers[0].kernel.assign_add(tf.ones((3, 4)))
    assert np.allclose(whole(x), one(x))


def test_scopes_around_the_call_and_inside_it_are_kept(two: list[Any]) -> None:
    fast = mh.parallel(lambda x: x * 2.0 + 1.0)
    x = tf.ones(3)
    for _ in range(2):
        for device in two:
            with device:
                assert mh.device_of(fast(x)) == device
    with mh.gpu(1), mh.parallel(threads=2):
        assert mh.device_of(mh.task(lambda: tf.ones(3) + 1)().result()) == mh.gpu(1)
