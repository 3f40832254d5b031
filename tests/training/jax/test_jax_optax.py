"""Optax's optimizers and schedules: what a loop by hand gives, or refused with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax_cases import CLASSES, Net, difference, fit, numbers, same, vectors
from optax import contrib

from manyhands.errors import BadSettings

X, Y = vectors(48)
X = X.astype(np.float32)
BATCHES = [(X[start : start + 16], Y[start : start + 16]) for start in range(0, 48, 16)]


def by_hand(transformation: Any) -> dict[str, Any]:
    """The weights after two epochs of a loop as Optax's documentation writes it."""
    graph, parameters = nnx.split(Net())

    def loss(parameters: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, parameters)(batch[0]), batch[1]).mean()

    @jax.jit
    def step(parameters: Any, state: Any, batch: Any) -> Any:
        updates, state = transformation.update(jax.grad(loss)(parameters, batch), state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = transformation.init(parameters)
    for batch in BATCHES * 2:
        parameters, state = step(parameters, state, batch)
    return numbers(nnx.merge(graph, parameters))


def sam() -> Any:
    return contrib.sam(optax.adam(0.05), optax.chain(contrib.normalize(), optax.sgd(0.02)))


def noisy() -> Any:
    return optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))


COSINE = optax.cosine_decay_schedule(0.3, 6)


@pytest.mark.parametrize(
    ("transformation", "given"),
    [
        (optax.chain(optax.clip(0.1), sam()), {"optimizer": optax.chain(optax.clip(0.1), sam())}),
        (optax.adamw(COSINE), {"lr": COSINE, "optimizer": "adamw"}),
        (optax.lbfgs(0.1, linesearch=None), {"optimizer": optax.lbfgs(0.1, linesearch=None)}),
    ],
)
def test_it_is_what_a_loop_by_hand_gives(transformation: Any, given: dict[str, Any]) -> None:
    trained, _ = fit(Net(), BATCHES, **{"lr": None, **given})
    assert difference(trained, by_hand(transformation)) < 1e-4


def test_an_optimizer_that_draws_random_numbers_draws_them_again(tmp_path: Path) -> None:
    """On any number of devices, and in a resumed run."""
    whole, _ = fit(Net(), BATCHES, optimizer=noisy())
    fit(Net(), BATCHES, optimizer=noisy(), max_epochs=1, run=tmp_path / "run")
    resumed, _ = fit(Net(), BATCHES, optimizer=noisy(), run=tmp_path / "run", resume="auto")
    assert same(resumed, whole)
    two, _ = fit(Net(), BATCHES, 2, optimizer=noisy())
    assert difference(two, whole) < 1e-4
    plain, _ = fit(Net(), BATCHES, optimizer=optax.sgd(0.1))
    assert difference(plain, whole) > 1e-2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": optax.lbfgs()}, r"asks for more \(.*'value_fn'\).*lbfgs\(0\.1, linesearch=None\)"),
        ({"optimizer": contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)}, "without opaque_mode"),
        ({"optimizer": sam(), "schedule": lambda done: 0.5}, r"goes to another place and back \(sam\): leave out"),
        ({"lr": COSINE, "schedule": lambda done: 0.5}, "a schedule already: leave out schedule="),
        ({"lr": COSINE, "optimizer": optax.sgd(0.1)}, "the optimizer has its own learning rate"),
        ({"lr": 0.1, "optimizer": lambda rate: rate}, "has to return an optimizer"),
        ({"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)}, r"\.gradient_transformation\(\)"),
        ({"optimizer": nnx.Optimizer(Net(), optax.sgd(0.1), wrt=nnx.Param)}, r"its \.tx"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        fit(Net(), BATCHES, **{"lr": None, **given})


class Words(nnx.Module):
    def __init__(self) -> None:
        self.embed, self.last = nnx.Embed(7, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, CLASSES, rngs=nnx.Rngs(1))
        self.attend = nnx.MultiHeadAttention(2, 4, decode=False, dropout_rate=0.1, rngs=nnx.Rngs(2))

    def __call__(self, words: Any) -> Any:
        return self.last(self.attend(self.embed(words)).mean(1))


@pytest.mark.parametrize("count", [2, 3])
def test_an_embedding_in_64_bits(count: int) -> None:
    """Shards of unequal size aborted the process; and an ``nnx.Embed`` remembers the precision it was made in."""
    words = np.random.default_rng(0).integers(7, size=(20, 5))
    alone, _ = fit(Words(), (words, Y[:20]), 1, batch_size=10, precision="fp64")
    several, _ = fit(Words(), (words, Y[:20]), count, batch_size=10, precision="fp64")
    assert difference(several, alone) <= 1e-12
