"""The update on several devices is that of one, in float64 to 1e-12, whatever the division."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import CLASSES, convnet, difference, fit, images, mlp, momentum, tensors, vectors

from manyhands.cli import parity
from manyhands.training.options import Step


@pytest.mark.parametrize(
    ("devices", "how"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        (3, {"step": Step(shares=[3, 2, 1]), "gradient_clip_val": 0.1}),
        (2, {"batch_size": 3, "step": Step(shares=[0.9, 0.1])}),  # a device without samples
        (2, {"step": Step(accumulate=3), "schedule": lambda done: 1 - done}),
        (2, {"optimizer": lambda rate: keras.optimizers.Nadam(rate, clipnorm=0.5, weight_decay=0.01)}),
    ],
)
def test_several_devices_make_the_update_of_one(devices: int, how: dict[str, Any]) -> None:
    assert difference(mlp, vectors(50), devices, **how) < 1e-12


@pytest.mark.parametrize("shares", [pytest.param(None, marks=pytest.mark.long), [5, 1]])
def test_statistics_over_the_whole_batch(shares: list[float] | None) -> None:
    """Also where the last batch, of a single sample, leaves nothing to the second device."""
    assert difference(convnet, images(17), 2, step=Step(shares=shares, batch_stats="global")) < 1e-12


def test_penalties_are_the_same_on_any_number_of_devices() -> None:
    def penalised() -> Any:
        return layers.Dense(5, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.1))

    assert difference(lambda: mlp(penalised), vectors(50), 2) < 1e-12


def test_statistics_of_each_shard_are_said_to_be_so_and_a_device_without_samples_does_not_spoil_them() -> None:
    model = convnet()
    result = fit(model, (images(), images()), 3, epochs=1, batch_size=5)  # two samples are the least: 2, 3 and none
    assert "batch normalisation takes its statistics over each device's shard" in result.notes
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert result.rows[-1]["samples"] == 40
    assert not model.layers[1].synchronized


def test_a_test_counts_every_sample_once() -> None:
    X, y = vectors(50)
    test = X[:7], y[:7]
    model = mlp()
    result = fit(model, ((X, y), test), 3, epochs=1)
    scores = model(test[0]).numpy()
    assert result.rows[-1]["val_acc"] == np.mean(scores.argmax(1) == test[1])
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")(test[1], scores)
    assert result.rows[-1]["val_loss"] == pytest.approx(float(expected), rel=1e-9)


def test_a_loader_gives_what_its_arrays_give() -> None:
    X, y = vectors(40)
    batches = [(X[i : i + 16], y[i : i + 16]) for i in range(0, 40, 16)]
    one, other = mlp(), mlp()
    fit(one, batches, 2, epochs=1)
    fit(other, tf.data.Dataset.from_tensor_slices((X, y)).batch(16), 1, epochs=1)
    assert parity.largest_difference(tensors(one), tensors(other)) < 1e-12
    by_hand = mlp()
    by_hand.compile(momentum(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64"))
    by_hand.fit(X, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    assert parity.largest_difference(tensors(one), tensors(by_hand)) < 1e-12


def test_a_shuffled_dataset_has_one_order_on_any_number_of_devices() -> None:
    """Each look at a tf.data.Dataset moves its shuffle on."""

    def shuffled() -> Any:
        return tf.data.Dataset.from_tensor_slices(vectors(40)).shuffle(40).batch(16).prefetch(1)

    alone, several = mlp(), mlp()
    notes = [*fit(alone, shuffled()).notes, *fit(several, shuffled(), 2).notes]
    assert parity.largest_difference(tensors(alone), tensors(several)) < 1e-12
    assert not any("without a seed" in note for note in notes)


def test_dropout_draws_other_numbers_on_every_device_and_step_and_the_same_in_every_run() -> None:
    class Seen(keras.Layer):
        """Noise without a generator of its own, and a note of what was drawn."""

        def build(self, shape: Any) -> None:
            self.sum = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, X: Any, training: bool | None = None) -> Any:
            noise = keras.random.normal((4,), dtype="float64")
            self.sum.assign(noise[0])
            return X + 0.01 * noise[0]

    def draws(devices: int, epochs: int) -> list[float]:
        model = mlp(lambda: layers.Dropout(0.5), Seen)
        fit(model, vectors(16), devices, epochs=epochs, step=Step(shares=None if devices == 1 else [1, 2]))
        return [float(model.layers[-2].sum), float(model.get_weights()[0][0, 0])]

    first, again, second_step, second_device = draws(1, 1), draws(1, 1), draws(1, 2), draws(2, 1)
    assert first == again
    assert len({first[0], second_step[0], second_device[0]}) == 3


def test_a_model_of_ones_own_class_trains_on_several_devices() -> None:
    class Own(keras.Model):
        def __init__(self, width: Any) -> None:  # cannot be made anew from a configuration
            super().__init__(dtype="float64")
            self.hidden = layers.Dense(width(), activation="tanh", dtype="float64")
            self.out = layers.Dense(CLASSES, dtype="float64")

        def call(self, X: Any) -> Any:
            return self.out(self.hidden(X))

    def make() -> Any:
        model = Own(lambda: 4)
        model(np.zeros((1, 6)))
        for number, weight in enumerate(model.weights):
            weight.assign(np.random.RandomState(number).normal(size=weight.shape))
        return model

    assert difference(make, vectors(50), 2) < 1e-12
