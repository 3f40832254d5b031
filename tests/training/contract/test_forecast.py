"""``mh.forecast``: from a measured step to rows, and the model stays as it is; other frameworks are refused."""

from __future__ import annotations

import numpy as np
import pytest
from training_bench import Bench, small_set

from manyhands.book import recipes
from manyhands.errors import BadSettings
from manyhands.forecast import measured


def test_a_step_is_measured_and_the_model_left_alone(bench: Bench) -> None:
    if bench.framework not in ("torch", "jax"):
        with pytest.raises(BadSettings, match="forecast measures models of PyTorch and JAX"):
            bench.mh.forecast(recipes.of(bench.framework).model("mlp", 0), (np.zeros((2, 28, 28)), np.zeros(2)))
        return
    model, batch = bench.recipes.model("mlp", 0), measured.of(bench.framework).noise(16)
    images = small_set().test.images[:5]
    before = bench.scores(model, images)
    made = bench.mh.forecast(model, batch, devices=[1, 2, 64], link="nvlink", precision="fp32")
    assert [row.devices for row in made.rows] == [1, 2, 64]
    assert made.rows[0].seconds > 0
    assert made.profile.gradient_bytes >= 784 * 10 * 4
    assert ("peak memory" in str(made)) == (bench.framework == "torch")
    assert np.array_equal(before, bench.scores(model, images))
    with pytest.raises(BadSettings, match="whole numbers of at least 1"):
        bench.mh.forecast(model, batch, devices=[0])
