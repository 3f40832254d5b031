"""The update on several devices is that of one, in float64 to 1e-12, whatever the division."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax_cases import CLASSES, Net, difference, fit, rows, vectors

from manyhands.errors import BadSettings
from manyhands.training.jax.world import places
from manyhands.training.loss.own_step import LossSum
from manyhands.training.options import Step
from manyhands.training.schedules import one_cycle

CLOSE = 1e-12


def momentum(rate: float) -> Any:
    return optax.chain(optax.add_decayed_weights(0.01), optax.sgd(rate, momentum=0.9, nesterov=True))


def test_steps_with_all_that_is_hard_to_divide() -> None:
    """Statistics over the batch, clipping, a schedule; 50 samples in batches of 16, the last of which has two."""
    data = vectors(50), vectors(41)
    how = {"precision": "fp64", "optimizer": momentum, "schedule": one_cycle, "gradient_clip_val": 0.3}
    alone, result = fit(Net(norm=True), data, 1, max_epochs=3, **how)
    several, other = fit(Net(norm=True), data, 3, max_epochs=3, **how)
    assert difference(several, alone) <= 1e-10  # normalising two samples magnifies differences
    for one, two in zip(rows(result), rows(other), strict=True):
        assert one == pytest.approx(two, rel=1e-9)


def test_the_batches_are_the_same_wherever_they_are_gathered() -> None:
    here, _ = fit(Net(), vectors(50), 3, max_epochs=1)
    there, _ = fit(Net(), vectors(50), 3, step=Step(optimize="off"), max_epochs=1)
    assert difference(there, here) == 0


def test_dropout_draws_the_same_numbers_on_any_number_of_devices() -> None:
    alone, _ = fit(Net(dropout=0.5), vectors(), 1, precision="fp64")
    three, _ = fit(Net(dropout=0.5), vectors(), 3, precision="fp64")
    assert difference(three, alone) <= CLOSE
    assert alone["dropout.rngs.count"] == 8


def loss_of_all(output: Any, target: Any) -> Any:
    """No mean over samples: every sample matters for every other."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(output, target).max() + output.std()


def test_a_loss_may_be_any_function_of_the_batch() -> None:
    alone, _ = fit(Net(), vectors(48), 1, precision="fp64", loss=loss_of_all)
    three, _ = fit(Net(), vectors(48), 3, precision="fp64", loss=loss_of_all)
    assert difference(three, alone) <= CLOSE


WEIGHT = np.array([0.2, 1.0, 5.0])


def weighted(output: Any, target: Any) -> LossSum:
    """A mean that is divided by what the labels weigh."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(output, target)
    weights = jnp.asarray(WEIGHT)[target]
    return LossSum((losses * weights).sum(), weights.sum())


class WeightedStep(Net):
    def training_step(self, batch: Any) -> LossSum:
        return weighted(self(batch[0]), batch[1])


def test_a_sum_and_its_count() -> None:
    """In a step it is the mean of the batch; over a test set all sums are divided by all counts, once."""
    X, y = vectors(600)  # two batches of a test
    net = Net()
    alone, result = fit(net, (vectors(48), (X, y)), 1, precision="fp64", loss=weighted)

    def mean(output: Any, target: Any) -> Any:
        both = weighted(output, target)
        return both.total / both.count

    as_mean, plain = fit(Net(), (vectors(48), (X, y)), 1, precision="fp64", loss=mean)
    assert difference(alone, as_mean) <= CLOSE
    assert result.rows[-1]["train_loss"] == pytest.approx(plain.rows[-1]["train_loss"], rel=1e-12)
    with jax.enable_x64(True):
        expected = float(mean(net(jnp.asarray(X)), y))
    assert result.rows[-1]["val_loss"] == pytest.approx(expected, rel=1e-12)
    assert result.rows[-1]["val_loss"] != pytest.approx(plain.rows[-1]["val_loss"], rel=1e-6)
    several, other = fit(WeightedStep(), (vectors(48), (X, y)), 3, precision="fp64")
    assert difference(several, alone) <= CLOSE
    assert other.rows[-1]["val_loss"] == pytest.approx(expected, rel=1e-12)


class Chunks:
    """Nothing but something to iterate over: batches."""

    def __init__(self, count: int = 50) -> None:
        self.X, self.y = vectors(count)

    def __iter__(self) -> Any:
        return iter([(self.X[i : i + 16], self.y[i : i + 16]) for i in range(0, len(self.y), 16)])


class Shuffles(Chunks):
    """In an order that a generator draws: NumPy's own, or the one that is given."""

    def __init__(self, generator: Any = np.random) -> None:
        super().__init__(48)
        self.generator = generator

    def __iter__(self) -> Any:
        order = self.generator.permutation(len(self.y))
        return iter([(self.X[part], self.y[part]) for part in np.split(order, [16, 32])])


def test_rows_that_only_fill_up_a_part_repeat_the_first_sample() -> None:
    assert places(10, 3).tolist() == [*range(10), 0, 0]


class Centred(nnx.Module):
    """Its forward pass compares the samples of a batch, in front of a loss that is known."""

    def __init__(self) -> None:
        self.first, self.last = nnx.Linear(6, 8, rngs=nnx.Rngs(3)), nnx.Linear(8, CLASSES, rngs=nnx.Rngs(4))

    def __call__(self, X: Any) -> Any:
        hidden = jnp.tanh(self.first(X))
        return self.last(hidden - hidden.mean(0))


def test_a_model_that_compares_samples_is_refused_in_parts() -> None:
    fit(Centred(), vectors(), max_epochs=1)
    with pytest.raises(BadSettings, match="depends on the other samples"):
        fit(Centred(), vectors(), max_epochs=1, step=Step(accumulate=2))
