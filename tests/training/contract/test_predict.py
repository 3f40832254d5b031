"""``mh.predict`` in every framework: from a measured step to rows, and the model stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
from training_bench import Bench, small_set

from manyhands.cli.predict import _framework
from manyhands.errors import BadSettings


def test_predict_measures_a_step_and_leaves_the_model_alone(bench: Bench) -> None:
    model, batch = _framework(bench.framework).example("mlp", 16)
    images = small_set().test.images[:5]
    before = bench.scores(model, images)
    made = bench.mh.predict(model, batch, devices=[1, 2, 64], link="nvlink", precision="fp32")
    assert [row.devices for row in made.rows] == [1, 2, 64]
    assert made.rows[0].seconds > 0
    assert made.profile.gradient_bytes >= 784 * 10 * 4
    assert ("peak memory" in str(made)) == (bench.framework == "torch")
    assert np.array_equal(before, bench.scores(model, images))
    with pytest.raises(BadSettings, match="whole numbers of at least 1"):
        bench.mh.predict(model, batch, devices=[0])
