"""The contract suite in TensorFlow's words: random trainings (see :mod:`random_jobs`), and what single tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from random_jobs import CLASSES, FEATURES, LENGTH, PADDING, WORDS, Batches, LossKind, ModelKind

from manyhands.book.tensorflow import initialise
from manyhands.tensorflow import LossSum

without: frozenset[str] = frozenset()
channels_first = False
WIDE = 5


@contextmanager
def float64() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def sequential(shape: tuple[int, ...], *makers: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        keras.utils.set_random_seed(3)  # for layers that draw their weights themselves
        return initialise(keras.Sequential([layers.Input(shape, **options), *(one() for one in makers)]), 3)

    return make


def dense(width: int, **options: Any) -> Callable[[], Any]:
    return lambda: layers.Dense(width, **options)


def tanh() -> Any:
    return layers.Activation("tanh")


def tied() -> Any:
    """One layer used twice, and one frozen."""
    keras.utils.set_random_seed(3)
    start = layers.Input((FEATURES,))
    twice = layers.Dense(FEATURES, activation="tanh")
    frozen = layers.Dense(FEATURES)
    net = keras.Model(start, layers.Dense(CLASSES)(twice(twice(frozen(start)))))
    frozen.trainable = False
    return net


class Stepping(keras.Model):  # type: ignore[misc]
    """Says itself what a step is."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(3)
        super().__init__()
        self.words, self.scores = layers.Embedding(WORDS, WIDE), layers.Dense(CLASSES)
        self(tf.zeros((1, LENGTH), tf.int32))

    def call(self, X: Any, training: bool = False) -> Any:
        return self.scores(tf.tanh(self.words(X)))

    def training_step(self, batch: Any) -> Any:
        return of_words(batch[1], self(batch[0]))


VECTORS, IMAGES, TEXTS = (FEATURES,), (FEATURES, FEATURES, 1), (LENGTH,)

models = {
    "mlp": ModelKind(sequential(VECTORS, dense(WIDE, activation="tanh"), dense(CLASSES))),
    "regularised": ModelKind(sequential(VECTORS, dense(WIDE, kernel_regularizer="l2"), tanh, dense(CLASSES))),
    "batch norm": ModelKind(
        sequential(VECTORS, dense(WIDE, use_bias=False), layers.BatchNormalization, tanh, dense(CLASSES)), mixes=True
    ),
    "dropout": ModelKind(sequential(VECTORS, dense(WIDE), lambda: layers.Dropout(0.4), dense(CLASSES)), draws=True),
    "convolutions": ModelKind(
        sequential(
            IMAGES, lambda: layers.Conv2D(4, 3), layers.ReLU, layers.MaxPooling2D, layers.Flatten, dense(CLASSES)
        ),
        inputs="images",
    ),
    "tied, frozen": ModelKind(tied),
    "recurrent": ModelKind(
        sequential(TEXTS, lambda: layers.Embedding(WORDS, WIDE), lambda: layers.LSTM(4), dense(CLASSES), dtype="int32"),
        inputs="words",
    ),
    "tagger": ModelKind(
        sequential(TEXTS, lambda: layers.Embedding(WORDS, WIDE), tanh, dense(CLASSES), dtype="int32"),
        inputs="words",
        gives="scores of words",
    ),
    "training_step": ModelKind(Stepping, inputs="words", step="words"),
}


def cross_entropy(target: Any, output: Any) -> Any:
    # Keras gives a loss its targets in the dtype of the answers.
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(target, tf.int64), output)


def weighed(target: Any, output: Any) -> LossSum:
    weights = tf.gather(tf.constant([1.0, 5.0, 0.3], tf.float64), tf.cast(target, tf.int64))
    return LossSum(tf.reduce_sum(cross_entropy(target, output) * weights), tf.reduce_sum(weights))


def of_words(target: Any, output: Any) -> LossSum:
    there = tf.cast(target != PADDING, tf.float64)
    each = cross_entropy(tf.maximum(target, 0), output) * there
    return LossSum(tf.reduce_sum(each), tf.reduce_sum(there))


# As Keras calls them: the target first.
losses = {
    "default": LossKind(None),
    "weighed classes": LossKind(weighed),
    "MSE, an object": LossKind(keras.losses.MeanSquaredError(dtype="float64"), targets="numbers"),
    "lopsided": LossKind(lambda target, output: tf.reduce_mean((target - 2 * output) ** 2, axis=1), targets="numbers"),
    "words": LossKind(of_words, targets="words", takes="scores of words"),
}

optimizers: dict[str, Callable[[float], Any]] = {
    "momentum, decay": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
    "adamw, amsgrad": lambda rate: keras.optimizers.AdamW(rate, amsgrad=True),
    "clipped by value": lambda rate: keras.optimizers.Adam(rate, clipvalue=0.05),
}


def dataset(X: Any, y: Any, size: int, train: bool) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, y)).batch(size)


data: dict[str, tuple[Callable[..., Any], bool]] = {
    "arrays": (lambda X, y, size, train: (X, y), False),
    "TensorFlow's tensors": (lambda X, y, size, train: (tf.constant(X), tf.constant(y)), False),
    "tf.data": (dataset, True),
    "batches": (lambda X, y, size, train: Batches(X, y, size), False),
}


own = SimpleNamespace(
    array=np.asarray,
    scores=lambda model, X: np.asarray(model(X, training=False)),
    adam=keras.optimizers.Adam,
    loss=lambda y, scores: tf.reduce_mean(cross_entropy(y, scores)) * 2,
    root_loss=lambda y, scores: tf.sqrt(tf.reduce_mean(scores**2)),
    squares=[(keras.losses.MeanSquaredError, 1), (keras.losses.MeanSquaredError(), 1), ("mean_squared_error", 1)],
    metric=keras.metrics.SparseCategoricalAccuracy(),
    share_right=lambda scores, y: tf.reduce_mean(tf.cast(tf.argmax(scores, 1) == tf.cast(y, tf.int64), tf.float32)),
    scheduled=lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 8), momentum=0.9),
    normalising=lambda: keras.Sequential(
        [keras.Input((4,)), layers.Dense(6), layers.BatchNormalization(), layers.Dense(3)]
    ),
    tensors=lambda model: model.get_weights(),
    last_layer="last",
)
