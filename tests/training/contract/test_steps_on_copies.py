"""What steps on copies tell before a training: the largest batch that fits, and the time on other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from training_bench import Bench, small_set

from manyhands.errors import BadSettings
from manyhands.forecast import measured

_FITS = 8  # samples; with more a loss asks for terabytes at once, which no machine begins to fill
_TERA = 2**41  # numbers
# PyTorch's allocator on Arm reserves any memory that there are addresses for, and then begins to fill it.
_MORE_THAN_ADDRESSES = 2**50


def greedy(framework: str) -> Callable[[Any, Any], Any]:
    """A loss that needs more memory than there is for more than a few samples, in the framework's own operations."""
    if framework == "torch":
        import torch

        def loss(output: Any, target: Any) -> Any:
            extra = torch.ones(_MORE_THAN_ADDRESSES if len(output) > _FITS else 1).sum() * 0
            return torch.nn.functional.cross_entropy(output, target) + extra

        return loss
    import jax.numpy as jnp
    import optax

    def loss(output: Any, target: Any) -> Any:
        extra = jnp.cumsum(jnp.broadcast_to(output[0, 0], (_TERA if len(output) > _FITS else 1,)))[-1] * 0
        return optax.softmax_cross_entropy_with_integer_labels(output, target).mean() + extra

    return loss


def test_the_largest_batch_that_fits(bench: Bench) -> None:
    model, how = bench.recipes.model("mlp", 0), {"quiet": True, "precision": "fp32", "lr": 0.1}
    image = np.full((1, 28, 28), 100, np.uint8)
    before = bench.scores(model, image)
    trainer = bench.mh.Trainer(1, **how, **bench.on(1))
    if bench.framework not in ("torch", "jax"):
        with pytest.raises(BadSettings, match="in PyTorch and in JAX"):
            trainer.find_batch_size(model, bench.images(32))
        return
    assert trainer.find_batch_size(model, bench.images(32), maximum=12) == 12
    full = bench.mh.Trainer(1, **how, loss=greedy(bench.framework), **bench.on(1))
    assert full.find_batch_size(model, bench.images(32), maximum=10) == _FITS
    np.testing.assert_array_equal(bench.scores(model, image), before)
    with pytest.raises(BadSettings, match="a loader has its own batches"):
        trainer.find_batch_size(model, lambda: iter([bench.images(32)]))


def test_a_step_is_measured_and_the_model_left_alone(bench: Bench) -> None:
    if bench.framework not in ("torch", "jax"):
        with pytest.raises(BadSettings, match="forecast measures models of PyTorch and JAX"):
            bench.mh.forecast(bench.recipes.model("mlp", 0), (np.zeros((2, 28, 28)), np.zeros(2)))
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
