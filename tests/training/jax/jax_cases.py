"""Small models, data and a short way to train them, for the tests of training with JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from manyhands import jax as mh
from manyhands.cli import parity
from manyhands.training.jax.skeleton import PARTS, Skeleton, by_name, to_double
from manyhands.training.jax.trainer import Trainer
from manyhands.training.result import Result

CLASSES = 3


def vectors(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Whole batches of 16, unless another number is given: a short one at the end is one more program to compile."""
    generator = np.random.default_rng(1)
    return generator.normal(size=(count, 6)), generator.integers(CLASSES, size=count)


class Net(nnx.Module):
    """A small net with all that is hard to divide: statistics over the batch, and dropout."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        rngs = nnx.Rngs(3)
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.last = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, X: Any) -> Any:
        X = self.first(X)
        X = X if self.norm is None else self.norm(X)
        X = jnp.tanh(X)
        return self.last(X if self.dropout is None else self.dropout(X))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, X: Any, train: bool) -> Any:
        X = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(8)(X))
        return linen.Dense(CLASSES)(linen.Dropout(0.2, deterministic=not train)(jnp.tanh(X)))


def devices(count: int) -> list[Any]:
    if mh.num_gpus() < count:
        pytest.skip(f"needs {count} devices: MANYHANDS_VIRTUAL_DEVICES=3")
    return [mh.gpu(i) for i in range(count)]


def fit(model: nnx.Module, data: Any, count: int = 1, **options: Any) -> tuple[dict[str, np.ndarray], Result]:
    """Train on a number of devices; gives copies of all numbers, and the result. In double precision, if asked."""
    given = {"max_epochs": 2, "batch_size": 16, "quiet": True, **options}
    has_rate = isinstance(given.get("optimizer"), optax.GradientTransformation)
    if not has_rate and not hasattr(model, "configure_optimizers"):
        given.setdefault("lr", 0.1)
    with jax.enable_x64(given.get("precision") == "fp64"):
        if given.get("precision") == "fp64":
            to_double(model)
        result = Trainer(devices=devices(count), **given).fit(model, data)
        return numbers(model), result


def numbers(model: nnx.Module) -> dict[str, np.ndarray]:
    found = Skeleton(model).numbers(model)
    return {name: np.array(one) for part in PARTS for name, one in by_name(found[part]).items()}


def difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    assert first.keys() == second.keys()
    return parity.largest_difference(first, second)


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def rows(result: Result) -> list[dict[str, Any]]:
    """The rows of a result without what the clock says."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.rows]
