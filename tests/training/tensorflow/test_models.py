"""The built-in models: the same as PyTorch's, weight by weight and answer by answer."""

from __future__ import annotations

import keras
import numpy as np

from manyhands.book.models import WEIGHT_NAMES
from manyhands.book.tensorflow import MODELS, initialise, lenet
from manyhands.training.tensorflow.model import names


def test_layers_have_pytorchs_names() -> None:
    own = dict.fromkeys(names(MODELS["small-resnet"]()), np.zeros(1))
    common = set(WEIGHT_NAMES["tensorflow"].to_common(own, "small-resnet"))
    assert common >= {"0.weight", "1.running_var", "resnet_block2.0.conv3.bias", "resnet_block3.0.bn2.weight"}


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

    assert names(make()) == names(make())
    assert len(set(names(make()))) == 8
