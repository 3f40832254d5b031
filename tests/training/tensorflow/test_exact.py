"""The update on several devices is that of one, in float64 to 1e-12, whatever the division."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import convnet, difference, fit, images, mlp, tensors, vectors

from manyhands.cli import parity
from manyhands.training.options import Step

OF_SCORES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # names no precision: the model's counts


def nadam(rate: float) -> Any:
    return keras.optimizers.Nadam(rate, clipnorm=0.5, weight_decay=0.01)


@pytest.mark.parametrize(
    ("devices", "how"),
    [
        (3, {"step": Step(shares=[3, 2, 1]), "gradient_clip_val": 0.1, "loss": OF_SCORES}),
        # A device without samples
        (2, {"batch_size": 3, "step": Step(shares=[0.9, 0.1]), "optimizer": nadam}),
    ],
)
def test_several_devices_make_the_update_of_one(devices: int, how: dict[str, Any]) -> None:
    assert difference(mlp, vectors(32), devices, epochs=1, **how) < 1e-12


def test_statistics_over_the_whole_batch() -> None:
    """Also where the last batch, of a single sample, leaves nothing to the second device."""
    assert difference(convnet, images(17), 2, epochs=1, step=Step(shares=[5, 1], batch_stats="global")) < 1e-12


def test_a_device_without_samples_does_not_spoil_statistics() -> None:
    model = convnet()
    result = fit(model, (images(), images()), 3, epochs=1, batch_size=5)  # two samples are the least: 2, 3 and none
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert result.rows[-1]["samples"] == 40
    assert not model.layers[1].synchronized


def test_a_shuffled_dataset_has_one_order_on_any_number_of_devices() -> None:
    """Each look at a tf.data.Dataset moves its shuffle on."""

    def shuffled() -> Any:
        return tf.data.Dataset.from_tensor_slices(vectors(32)).shuffle(32).batch(16).prefetch(1)

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
