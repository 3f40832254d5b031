"""What cannot be trained is refused with the reason and the cure."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import Book, fit, mlp, unequal, vectors

from manyhands.errors import BadBatch, BadLabels, BadSettings, BadShares, NotATensor
from manyhands.training.options import Step


def _decay() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"optimizer": 3}, BadSettings, "function of the learning rate"),
        ({"optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)}, BadSettings, "accumulate"),
        ({"loss": "mean_square"}, BadSettings, "mean_squared_error"),
        ({"step": Step(shares=[1, 2])}, BadShares, "3 devices"),
        ({"loss": lambda y_true, y_pred: tf.reduce_sum(y_pred)}, BadSettings, "mean over the samples"),
        ({"schedule": _decay()}, BadSettings, "give it to the optimizer"),
        (
            {"schedule": lambda done: 1.0, "optimizer": lambda rate: keras.optimizers.SGD(_decay())},
            BadSettings,
            "keep one",
        ),
    ],
)
def test_settings(how: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fit(mlp(), vectors(), 3, **how)


def test_labels_that_the_model_has_no_output_for() -> None:
    X, y = vectors()
    with pytest.raises(BadLabels, match="from 0 to 3, but the model has 3 outputs"):
        fit(mlp(), (X, np.where(y == 2, 3, y)))
    with pytest.raises(BadLabels, match="from -1"):
        fit(mlp(), [(X[:8], y[:8]), (X[8:16], y[8:16]), (X[16:], y[16:] - 1)], batch_size=8)
    with pytest.raises(BadLabels, match="float32, and class numbers are whole"):
        fit(mlp(), (X, y.astype(np.float32)))
    with pytest.raises(BadLabels, match="from 0 to 7"):
        fit(Book(), (X, np.where(y == 2, 7, y)))


@pytest.mark.parametrize("columns", [1, 2])
def test_targets_of_another_width_than_the_answers(columns: int) -> None:
    """TensorFlow compares one column with all three answers, and Keras lets it."""
    X, _ = vectors()
    with pytest.raises(BadBatch, match=rf"output for a sample has shape \(3,\), and its target \({columns},"):
        fit(mlp(), (X, X[:, :columns]), loss="mse")


def test_models_that_are_none() -> None:
    with pytest.raises(BadSettings, match="no parameters"):
        fit(keras.Sequential([layers.Flatten()]), vectors())
    with pytest.raises(BadSettings, match=r"keras\.Model"):
        fit(lambda X: X, vectors())


def test_data_that_is_none() -> None:
    with pytest.raises(BadBatch, match="no batch"):
        fit(mlp(), [])
    with pytest.raises(NotATensor, match="cannot be read as data"):
        fit(mlp(), 5)
    X, y = vectors()
    with pytest.raises(BadBatch, match=r"has shape 'a': \(6,\), and Sequential takes inputs of shape \(6,\)"):
        fit(mlp(), tf.data.Dataset.from_tensor_slices(({"a": X}, y)).batch(16))
    with pytest.raises(BadBatch, match=r"have 6, 2 rows.*single samples.*\.batch\(64\)"):
        fit(mlp(), tf.data.Dataset.from_tensor_slices((X, X[:, :2])), loss="mse")
    with pytest.raises(BadSettings, match=r"gives a LossSum for the whole batch.*training_step"):
        fit(mlp(), (X, y, np.ones(len(y))), loss=unequal)


def test_a_model_with_weights_in_single_precision_is_not_trained_in_double() -> None:
    with pytest.raises(BadSettings, match=r"set_dtype_policy\('float64'\) before the model is made"):
        fit(mlp(dtype="float32"), vectors(), precision="fp64")
