"""The built-in models: the same as PyTorch's, weight by weight and answer by answer."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from manyhands.training.recipes import MODELS as NAMES
from manyhands.training.tensorflow import layout, state
from manyhands.training.tensorflow.datasets import scale_images
from manyhands.training.tensorflow.models import MODELS, Residual, initialise, lenet

sys.path.insert(0, str(Path(__file__).parents[1]))

import reference


def test_every_model_has_its_name() -> None:
    assert set(MODELS) == set(NAMES)


@pytest.mark.parametrize("name", ["mlp", "lenet", "small-resnet", "resnet18"])
def test_with_pytorchs_weights_a_model_gives_pytorchs_answers(name: str) -> None:
    net = MODELS[name]()
    common = reference.weights(name)
    own = layout.from_common(common, name)
    assert sorted(own) == sorted(state.names(net))
    net.set_weights([own[one] for one in state.names(net)])
    images, _ = scale_images((tf.constant(reference.images()), tf.zeros(4, tf.uint8)))
    np.testing.assert_allclose(net(images, training=False), reference.logits(name), rtol=1e-4, atol=1e-4)
    back = layout.to_common(dict(zip(state.names(net), net.get_weights(), strict=True)), name)
    assert sorted(back) == sorted(common)
    for one, value in common.items():
        np.testing.assert_array_equal(back[one], value)


def test_a_seed_gives_the_same_weights_and_leaves_the_programs_random_numbers_alone() -> None:
    np.random.seed(5)
    expected = np.random.RandomState(5).uniform()
    one, other, third = initialise(lenet(), 1), initialise(lenet(), 1), initialise(lenet(), 2)
    assert np.random.uniform() == expected
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.get_weights()[0], third.get_weights()[0])
    assert np.abs(one.get_weights()[0]).max() <= (6 / (25 + 6 * 25)) ** 0.5


def test_names_do_not_depend_on_what_was_made_before() -> None:
    def make() -> keras.Model:
        inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])
        return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(4), inner, keras.layers.Dense(2)])

    assert state.names(make()) == state.names(make())
    assert len(set(state.names(make()))) == 8


def test_a_block_that_changes_the_shape_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="use_1x1conv=True"):
        Residual(64, 128)
    with pytest.raises(TypeError, match="use_1x1conv=True"):
        Residual(64, True)
    block = Residual.from_config(Residual(3, use_1x1conv=True, strides=2).get_config())
    assert block(tf.zeros((2, 6, 6, 5))).shape == (2, 3, 3, 3)
