"""Losses mean what they mean in Keras, and the same on any number of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import CLASSES, Book, mlp, momentum, tensors, vectors

from manyhands import tensorflow as mh
from manyhands.cli import parity
from manyhands.errors import BadSettings
from manyhands.training.options import Step
from manyhands.training.result import Result

FEW = 24  # samples: three batches of 8


def fit(model: Any, data: Any, devices: int, **how: Any) -> Result:
    how = {"batch_size": 8, "quiet": True, "optimizer": momentum(0.05), **how}
    if devices > 1:
        how["step"] = replace(how.get("step", Step()), shares=[2, 1] if devices == 2 else [4, 2, 1])
    return mh.Trainer(1, devices=[f"virtual:{i}" for i in range(devices)], **how).fit(model, (data, data))


def same(make: Callable[[], Any], data: Any, **how: Any) -> None:
    """Train on one device and on two, and compare."""
    alone, several = make(), make()
    one, more = fit(alone, data, 1, **how), fit(several, data, 2, **how)
    for name in ("train_loss", "val_loss"):
        assert more.rows[0][name] == pytest.approx(one.rows[0][name], rel=1e-9), name
    assert parity.largest_difference(tensors(several), tensors(alone)) < 1e-9


def same_as_keras(make: Callable[[], Any], x: Any, y: Any, weight: Any = None, **compiled: Any) -> None:
    """A compiled model, trained on two devices, and by Keras's own ``fit`` in the same order."""

    def ready() -> Any:
        model = make()
        model.compile(momentum(0.05), **compiled)
        return model

    by_keras = ready()
    by_keras.fit(x, y, sample_weight=weight, batch_size=8, epochs=1, verbose=0, shuffle=False)
    everything = (x, y) if weight is None else (x, y, weight)
    batches = [keras.tree.map_structure(lambda part, i=i: part[i : i + 8], everything) for i in range(0, FEW, 8)]
    ours = ready()
    fit(ours, batches, 2, optimizer=None, batch_size=None)
    assert parity.largest_difference(tensors(ours), tensors(by_keras)) < 1e-6


def numbers() -> tuple[Any, Any]:
    X, _ = vectors(FEW)
    return X, np.random.RandomState(5).normal(size=(FEW, CLASSES))


def texts() -> tuple[Any, Any]:
    """Token numbers, padded with zeros to unequal lengths, and a class for every token."""
    random = np.random.RandomState(6)
    X = random.randint(1, 9, (FEW, 5))
    X[np.arange(5)[None] >= np.linspace(1, 5.9, FEW).astype(int)[:, None]] = 0
    return X, random.randint(0, CLASSES, X.shape)


def tagger() -> Any:
    """A class for every token; what is padding is masked."""
    keras.utils.set_random_seed(3)
    embedding = layers.Embedding(9, 4, mask_zero=True, dtype="float64")
    return keras.Sequential([layers.Input((5,)), embedding, layers.Dense(CLASSES, dtype="float64")])


def sparse(**how: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64", **how)


# Keras's losses


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.reduce_sum(y_pred)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (sparse(reduction="sum"), "reduction='sum'.*leave reduction= out"),
        ({"price": sparse(reduction=None)}, "reduction=.*leave reduction= out"),
        (OwnCall(), "OwnCall has a __call__ of its own: write call"),
        (keras.losses.Dice(), r"one ratio over all samples of a batch.*Dice\(axis="),
        ("tversky", r"one ratio over all samples of a batch.*Tversky\(axis="),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_refused_by_name(loss: Any, words: str) -> None:
    with pytest.raises(BadSettings, match=words):
        mh.Trainer(1, loss=loss)
    model = mlp()
    model.compile(momentum(0.05), loss)
    with pytest.raises(BadSettings, match=words):
        mh.Trainer(1, quiet=True).fit(model, vectors(FEW))


def pinball(y_true: Any, y_pred: Any) -> Any:
    error = y_true - y_pred
    return tf.reduce_mean(tf.maximum(0.9 * error, -0.1 * error), axis=-1)


X, Y = vectors(FEW)
WEIGHTS = np.random.RandomState(7).uniform(0, 2, FEW)
AS_IN_KERAS: dict[str, tuple[Any, Any, Any]] = {
    "masked tokens": (tagger, texts(), sparse()),
    "weights of samples": (mlp, (X, Y, WEIGHTS), sparse(reduction="mean_with_sample_weight")),
    "an ignored class": (mlp, (X, np.where(np.arange(FEW) % 8 < 5, Y, -1)), sparse(ignore_class=-1)),
    "a function of one's own": (mlp, numbers(), pinball),
}


@pytest.mark.parametrize("name", AS_IN_KERAS)
def test_samples_count_as_in_keras(name: str) -> None:
    make, data, loss = AS_IN_KERAS[name]
    same_as_keras(make, *data, loss=loss)


def test_losses_of_several_outputs_have_their_weights() -> None:
    def make() -> Any:
        given = layers.Input((6,))
        hidden = layers.Dense(4, dtype="float64", name="hidden")(given)
        widths = {"first": 2, "second": CLASSES}
        outputs = [layers.Dense(width, dtype="float64", name=name)(hidden) for name, width in widths.items()]
        model = keras.Model(given, outputs)
        for number, weight in enumerate(model.weights):
            weight.assign(np.random.RandomState(number).normal(size=weight.shape))
        return model

    X, y = vectors(FEW)
    losses = {"first": keras.losses.MeanSquaredError(dtype="float64"), "second": sparse()}
    same_as_keras(make, X, [X[:, :2], y], loss=losses, loss_weights={"first": 0.25, "second": 3.0})


# Losses of one's own


def test_losses_by_name_by_class_and_of_ones_own() -> None:
    def trained(loss: Any) -> Any:
        model = mlp(dtype="float32")
        how: dict[str, Any] = {"batch_size": 8, "quiet": True, "optimizer": momentum(0.05), "loss": loss}
        mh.Trainer(1, devices=["virtual:0"], **how).fit(model, numbers())
        return tensors(model)

    class Pinball(keras.losses.Loss):
        call = staticmethod(pinball)

    assert parity.largest_difference(trained("mse"), trained(keras.losses.MeanSquaredError)) < 1e-6
    assert parity.largest_difference(trained(pinball), trained(Pinball())) < 1e-6


class Entropy(Book):
    """The book's order of arguments, with a loss of Keras's within."""

    def loss(self, y_hat: Any, y: Any) -> Any:
        return sparse()(y, y_hat)


def test_a_model_that_uses_keras_losses_itself() -> None:
    same(Entropy, vectors(FEW))


def test_a_sum_and_its_count_are_exact() -> None:
    def loss(y_true: Any, y_pred: Any) -> Any:
        weight = 1 + y_true[:, 0] ** 2
        return mh.LossSum(tf.reduce_sum(weight * tf.reduce_sum((y_true - y_pred) ** 2, 1)), tf.reduce_sum(weight))

    def penalised() -> Any:  # a mean over samples beside the sum
        return mlp(lambda: layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.1)))

    same(penalised, numbers(), loss=loss)


def test_a_mean_over_something_else_is_refused_with_advice_that_works() -> None:
    def weighted(y_true: Any, y_pred: Any) -> Any:
        weight = 1 + y_true[:, 0] ** 2
        return tf.reduce_sum(weight * tf.reduce_sum((y_true - y_pred) ** 2, 1)) / tf.reduce_sum(weight)

    zeros = mlp()
    for weight in zeros.layers[-1].weights:
        weight.assign(np.zeros(weight.shape))
    X, angles = vectors(FEW)[0], np.linspace(0, 1, FEW)
    y = np.stack([np.cos(angles), np.sin(angles), 0 * angles], 1)  # all samples have the same loss
    with pytest.raises(BadSettings, match=r"gradients of.*`return mh\.LossSum\(total, count\)`"):
        fit(zeros, (X, y), 2, loss=weighted)


def test_a_loss_that_adds_up_is_not_refused_because_of_dropout_and_statistics() -> None:
    model = mlp(layers.BatchNormalization, lambda: layers.Dropout(0.5))
    result = fit(model, numbers(), 2, loss=lambda y_true, y_pred: tf.reduce_mean((y_true - y_pred) ** 2))
    assert not any("not checked" in note for note in result.notes)
    assert model.layers[-2].rate == 0.5
    assert model.layers[-3].trainable


def test_the_trial_of_a_loss_runs_the_users_code_once_and_draws_no_random_numbers() -> None:
    calls: list[int] = []

    def own(y_true: Any, y_pred: Any) -> Any:
        calls.append(np.random.randint(9))
        return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred)) * 2

    def first_step(done: float) -> float:
        raise InterruptedError(len(calls))

    before = np.random.get_state()[2]
    with pytest.raises(InterruptedError, match="1"):
        fit(mlp(), numbers(), 2, loss=own, schedule=first_step, optimizer="sgd")
    assert np.random.get_state()[2] == before


@pytest.mark.filterwarnings("ignore:.*produced by a Softmax activation")
def test_a_model_that_ends_with_a_softmax_is_trained_by_the_scores_before_it() -> None:
    """As Keras does it by its own losses. A second softmax would train, too, but slowly."""
    softmax = layers.Softmax(dtype="mixed_bfloat16")
    plain, ending = mlp(dtype="mixed_bfloat16"), mlp(dtype="mixed_bfloat16")
    ending.add(softmax)
    expected, row = fit(plain, vectors(FEW), 2).rows[0], fit(ending, vectors(FEW), 2).rows[0]
    for name in ("train_loss", "val_loss"):
        assert row[name] == pytest.approx(expected[name], rel=1e-9)
    assert parity.largest_difference(tensors(ending), tensors(plain)) < 1e-9
