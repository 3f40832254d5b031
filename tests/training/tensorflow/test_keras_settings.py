"""What ``model.compile``, an optimizer or a model's class say is done as Keras does it, or refused by name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import CLASSES, Book, images, mlp, tensors, vectors

from manyhands import tensorflow as mh
from manyhands.cli import parity
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.result import Result

FEW = 24


def fit(model: Any, data: Any, devices: int = 2, **how: Any) -> Result:
    return mh.Trainer(2, devices=[f"virtual:{i}" for i in range(devices)], quiet=True, **how).fit(model, data)


def sparse(**how: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **how)


def difference_from_keras(make: Any) -> tuple[float, dict[str, Any], Result]:
    """Two devices and Keras's own ``fit``, on the same batches in the same order."""
    X, y = vectors(FEW)
    by_keras, ours = make(), make()
    history = by_keras.fit(X, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    batches = [(X[i : i + 8], y[i : i + 8]) for i in range(0, FEW, 8)]
    result = fit(ours, (batches, batches))
    return parity.largest_difference(tensors(ours), tensors(by_keras)), history, result


def test_all_that_an_optimizer_can_be_told_is_done() -> None:
    def make() -> Any:
        model = mlp()
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
        some = {"weight_decay": 0.5, "global_clipnorm": 0.2, "use_ema": True, "ema_momentum": 0.7}
        optimizer = keras.optimizers.AdamW(rate, loss_scale_factor=128.0, **some)
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
        model.compile(optimizer, sparse(dtype="float64"))
        return model

    difference, _, _ = difference_from_keras(make)
    assert difference < 1e-12


class Penalised(layers.Layer):
    def call(self, X: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(X**2))
        return X


def penalised(**compiled: Any) -> Any:
    hidden = {"kernel_regularizer": "l2", "kernel_constraint": "non_neg"}
    model = mlp(lambda: layers.Dense(5, activity_regularizer="l1", **hidden), Penalised, dtype="float32")
    model.compile(keras.optimizers.SGD(0.1), sparse(), **compiled)
    return model


def test_regularizers_constraints_and_accuracy_are_those_of_keras() -> None:
    difference, history, result = difference_from_keras(lambda: penalised(metrics=["accuracy"]))
    assert difference < 1e-5
    assert result.rows[-1]["train_loss"] == pytest.approx(history["loss"][-1], rel=1e-5)
    assert result.rows[-1]["train_acc"] == pytest.approx(history["accuracy"][-1])


def test_accuracy_of_one_hot_targets_and_of_a_single_score() -> None:
    X, y = vectors(FEW)
    one_hot = mlp(dtype="float32")
    one_hot.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["acc"])
    rows = fit(one_hot, (X, np.eye(CLASSES)[y]), 1).rows
    assert rows[0]["train_acc"] == pytest.approx(np.mean(np.argmax(mlp(dtype="float32")(X), 1) == y))
    single = keras.Sequential([layers.Input((6,)), layers.Dense(1, activation="sigmoid")])
    single.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=["accuracy"])
    rows = fit(single, (X, y > 0), 1).rows
    assert rows[0]["train_acc"] == pytest.approx(np.mean((single(X).numpy()[:, 0] > 0.5) == (y > 0)))


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnLoss(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return 2 * super().compute_loss(x, y, y_pred, sample_weight)


class OwnTest(keras.Model):
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


@pytest.mark.parametrize(
    ("kind", "compiled", "words"),
    [
        (OwnStep, {}, "train_step of its own.*training_step"),
        (OwnLoss, {}, "compute_loss of its own.*training_step"),
        (OwnTest, {}, "test_step of its own.*validation_step"),
        (keras.Model, {"run_eagerly": True}, "run_eagerly=True"),
        (keras.Model, {"weighted_metrics": ["mae"]}, "weighted_metrics.*give metrics="),
    ],
)
def test_what_would_be_lost_is_refused_by_name(kind: Any, compiled: dict[str, Any], words: str) -> None:
    given = keras.Input((6,))
    model = kind(given, mlp()(given))
    model.compile("sgd", sparse(), **compiled)
    with pytest.raises(BadSettings, match=words):
        fit(model, (vectors(), vectors()))


class Seen(keras.Model):
    """Counts its batches in a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(CLASSES)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, X: Any) -> Any:
        self.seen.assign_add(1.0)
        return self.dense(X)


def test_what_a_model_counts_in_a_weight_is_the_same_on_any_number_of_devices() -> None:
    """Neither the shapes of its layers nor the trial of a loss are counted."""
    X, y = vectors(FEW)
    for devices in (1, 2):
        model = Seen()
        fit(model, (X.astype(np.float32), y), devices, batch_size=8)
        assert float(model.seen) == 6


def test_float16_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"mixed_float16.*mixed_bfloat16"):
        fit(mlp(dtype="mixed_float16"), vectors())


# Data


def test_sample_weights_need_a_loss_that_takes_them() -> None:
    X, y = vectors(FEW)
    weight = np.ones(len(X))
    plain, weighed = (fit(mlp(), data, 1).rows[1]["train_loss"] for data in ((X, y), (X, y, weight)))
    assert plain == pytest.approx(weighed, rel=1e-12), "the default loss takes them"

    class Own(Book):
        def loss(self, y_hat: Any, y: Any) -> Any:
            return tf.reduce_mean(y_hat)

    with pytest.raises(BadBatch, match="the loss of Own takes no weights of samples"):
        fit(Own(), (X, y, weight))
    with pytest.raises(BadSettings, match="one number per sample"):
        fit(mlp(), (X, y, weight), loss=lambda y_true, y_pred: tf.reduce_mean(y_pred))
    with pytest.raises(BadBatch, match="5 parts, but Sequential takes 1 input"):
        fit(mlp(), (X, X, X, y, weight))


def test_inputs_of_another_shape() -> None:
    X, y = vectors()
    with pytest.raises(BadBatch, match=r"shape \(5,\), and Sequential takes inputs of shape \(6,\)"):
        fit(mlp(), (X[:, :5], y))
    X, y = images()
    with pytest.raises(BadBatch, match=r"channels, X\[\.\.\., np\.newaxis\]"):
        fit(keras.Sequential([layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(CLASSES)]), (X[..., 0], y))


def test_several_outputs_need_a_loss() -> None:
    given = keras.Input((6,))
    model = keras.Model(given, [layers.Dense(2)(given), layers.Dense(3)(given)])
    with pytest.raises(BadSettings, match="list of 2, and the default loss"):
        fit(model, vectors())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda loss: {"loss": loss}, "a dict of 'loss'"),
        (lambda loss: None, "None.*`return` missing"),
        (lambda loss: 0.5, "a float.*no gradient"),
        (lambda loss: mh.LossSum(tf.stack([loss, loss]), 2), r"a LossSum whose total has shape \(2,\).*reduce_sum"),
    ],
)
def test_what_a_step_has_to_return(value: Any, words: str) -> None:
    class Net(Book):
        def training_step(self, batch: Any) -> Any:
            return value(super().training_step(batch))

    with pytest.raises(BadSettings, match=rf"training_step of Net returned {words}"):
        fit(Net(), vectors())
