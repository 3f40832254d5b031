"""The contract suite in JAX's words: random trainings (see :mod:`random_jobs`), and what single tests need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from random_jobs import CLASSES, FEATURES, OWN_SCHEDULE, PADDING, WORDS, Batches, LossKind, ModelKind

from manyhands.jax import LossSum

without = frozenset({"batch_stats", "shares"})
channels_first = False
WIDE = 5


def float64() -> AbstractContextManager[Any]:
    return jax.enable_x64(True)


def dense(inputs: int, outputs: int, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, param_dtype=jnp.float64, rngs=rngs, **options)


def sequential(make: Callable[[nnx.Rngs], list[Any]]) -> Callable[[], Any]:
    return lambda: nnx.Sequential(*make(nnx.Rngs(3)))


def batch_norm(width: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(width, momentum=0.9, param_dtype=jnp.float64, rngs=rngs)


class Tied(nnx.Module):
    """One layer used twice, and one never used."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.twice, self.unused = dense(FEATURES, FEATURES, rngs), dense(2, 2, rngs)
        self.last = dense(FEATURES, CLASSES, rngs)

    def __call__(self, X: Any) -> Any:
        return self.last(jnp.tanh(self.twice(jnp.tanh(self.twice(X)))))


class Tagger(nnx.Module):
    """Scores for every word of a text."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.words = nnx.Embed(WORDS, WIDE, param_dtype=jnp.float64, rngs=rngs)
        self.scores = dense(WIDE, CLASSES, rngs)

    def __call__(self, X: Any) -> Any:
        return self.scores(jnp.tanh(self.words(X)))


class Stepping(Tagger):
    """Says itself what a step is."""

    def training_step(self, batch: Any) -> Any:
        return of_words(self(batch[0]), batch[1])


class Reader(nnx.Module):
    """A recurrent net over a text."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.words = nnx.Embed(WORDS, WIDE, param_dtype=jnp.float64, rngs=rngs)
        self.cells = nnx.RNN(nnx.GRUCell(WIDE, 4, param_dtype=jnp.float64, rngs=rngs))
        self.scores = dense(4, CLASSES, rngs)

    def __call__(self, X: Any) -> Any:
        return self.scores(self.cells(self.words(X))[:, -1])


def convolutions(rngs: nnx.Rngs) -> list[Any]:
    first = nnx.Conv(1, 4, (3, 3), padding="VALID", param_dtype=jnp.float64, rngs=rngs)
    return [first, nnx.relu, lambda X: nnx.max_pool(X, (2, 2), (2, 2)), flat, dense(16, CLASSES, rngs)]


def flat(X: Any) -> Any:
    return X.reshape(len(X), -1)


models = {
    "mlp": ModelKind(sequential(lambda rngs: [dense(FEATURES, WIDE, rngs), jnp.tanh, dense(WIDE, CLASSES, rngs)])),
    "batch norm": ModelKind(
        sequential(
            lambda rngs: [
                dense(FEATURES, WIDE, rngs, use_bias=False),
                batch_norm(WIDE, rngs),
                jnp.tanh,
                dense(WIDE, CLASSES, rngs),
            ]
        ),
        mixes=True,
    ),
    "dropout": ModelKind(
        sequential(lambda rngs: [dense(FEATURES, WIDE, rngs), nnx.Dropout(0.4, rngs=rngs), dense(WIDE, CLASSES, rngs)]),
        draws=True,
    ),
    "convolutions": ModelKind(sequential(convolutions), inputs="images"),
    "tied, unused": ModelKind(Tied),
    "recurrent": ModelKind(Reader, inputs="words"),
    "tagger": ModelKind(Tagger, inputs="words", gives="scores of words"),
    "training_step": ModelKind(Stepping, inputs="words", step="words"),
}  # fmt: skip


def cross_entropy(output: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output, target)


def weighed(output: Any, target: Any) -> LossSum:
    weights = jnp.array([1.0, 5.0, 0.3])[target]
    return LossSum((cross_entropy(output, target) * weights).sum(), weights.sum())


def of_words(output: Any, target: Any) -> LossSum:
    there = target != PADDING
    each = jnp.where(there, cross_entropy(output, jnp.maximum(target, 0)), 0)
    return LossSum(each.sum(), there.sum())


losses = {
    "default": LossKind(None),
    "weighed classes": LossKind(weighed),
    "squares, mean": LossKind(lambda output, target: ((output - target) ** 2).mean(), targets="numbers"),
    "words": LossKind(of_words, targets="words", takes="scores of words"),
}

optimizers: dict[str, Callable[[float], Any]] = {
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "nesterov, decay": lambda rate: optax.chain(
        optax.add_decayed_weights(0.01), optax.sgd(rate, momentum=0.9, nesterov=True)
    ),
    "adam": lambda rate: optax.adam(rate),
    OWN_SCHEDULE: lambda rate: optax.sgd(optax.exponential_decay(rate, 3, 0.5)),
    "clipped": lambda rate: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(rate)),
}


data: dict[str, tuple[Callable[..., Any], bool]] = {
    "arrays": (lambda X, y, size, train: (X, y), False),
    "JAX's arrays": (lambda X, y, size, train: (jnp.asarray(X), jnp.asarray(y)), False),
    "batches": (lambda X, y, size, train: Batches(X, y, size), False),
}


def scores(model: Any, X: Any) -> Any:
    model.eval()
    return np.asarray(model(X))


def normalising() -> Any:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs))


own = SimpleNamespace(
    array=np.asarray,
    scores=scores,
    adam=optax.adam,
    loss=lambda scores, y: cross_entropy(scores, y).mean() * 2,
    root_loss=lambda scores, y: (scores**2).mean() ** 0.5,
    squares=[(optax.squared_error, 10), (optax.l2_loss, 5)],  # of several numbers per sample the sum counts
    metric=None,
    share_right=lambda scores, y: (scores.argmax(1) == y).astype("float32").mean(),
    scheduled=lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 8), momentum=0.9),
    normalising=normalising,
    tensors=lambda model: list(map(np.asarray, jax.tree.leaves(nnx.state(model)))),
    last_layer=nnx.PathContains(2),
)
