"""Small models, data and a short way to train them, for the tests of training with TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from manyhands.book.tensorflow import Module, initialise
from manyhands.cli import parity
from manyhands.training.loss.own_step import LossSum
from manyhands.training.options import Step
from manyhands.training.result import Result
from manyhands.training.tensorflow.trainer import Trainer

CLASSES = 3


def vectors(count: int = 64) -> tuple[Any, Any]:
    """Whole batches of 16, unless another number is given: a short one at the end is one more graph to trace."""
    random = np.random.RandomState(1)
    return random.normal(size=(count, 6)), random.randint(0, CLASSES, count)


def images(count: int = 40) -> tuple[Any, Any]:
    random = np.random.RandomState(2)
    return random.normal(size=(count, 6, 6, 1)), random.randint(0, CLASSES, count)


def mlp(*middle: Any, dtype: str = "float64") -> Any:
    keras.config.set_dtype_policy(dtype)
    try:
        hidden = [layers.Dense(8, activation="tanh"), *(make() for make in middle)]
        return initialise(keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(CLASSES)]), 3)
    finally:
        keras.config.set_dtype_policy("float32")


class Book(Module):
    """A model of the book's; its loss is the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


def mixed() -> Any:
    """A model with statistics, and with numbers of two kinds."""
    return mlp(layers.BatchNormalization, lambda: layers.Dense(4, dtype="float32"))


def convnet(dtype: str = "float64") -> Any:
    keras.config.set_dtype_policy(dtype)
    try:
        net = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(2)]
        head = [layers.Flatten(), layers.Dense(8), layers.BatchNormalization(), layers.Dense(CLASSES)]
        return initialise(keras.Sequential([layers.Input((6, 6, 1)), *net, *head]), 4)
    finally:
        keras.config.set_dtype_policy("float32")


def momentum(rate: float) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9)


def unequal(y_true: Any, y_pred: Any) -> LossSum:
    """A mean in which samples of higher classes weigh more: a sum and its count."""
    labels = tf.cast(y_true, tf.int32)
    weight = tf.cast(1 + labels, y_pred.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y_pred)
    return LossSum(tf.reduce_sum(losses * weight), tf.reduce_sum(weight))


def fit(model: Any, data: Any, devices: int = 1, **how: Any) -> Result:
    how = {"batch_size": 16, "optimizer": momentum, "quiet": True, **how}
    if callable(how["optimizer"]):  # a finished one has its own rate
        how.setdefault("lr", 0.05)
    epochs = how.pop("epochs", 2)
    return Trainer(epochs, devices=[f"virtual:{i}" for i in range(devices)], **how).fit(model, data)


def difference(make: Callable[[], Any], data: Any, devices: int, **how: Any) -> float:
    """The largest relative difference between training on one device and on several."""
    alone, several = make(), make()
    fit(alone, data, 1, **{**how, "step": replace(how.get("step", Step()), shares=None)})
    fit(several, data, devices, **how)
    return parity.largest_difference(tensors(several), tensors(alone))


def tensors(model: Any) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(model.get_weights())}
