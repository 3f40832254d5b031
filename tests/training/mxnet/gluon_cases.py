"""Small models, data and a short way to train them with MXNet, for the tests of training."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from numpy.typing import NDArray

from manyhands.book.mxnet import initialise
from manyhands.training.mxnet import replicas
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.result import Result

CLASSES = 3

Arrays = tuple[NDArray[Any], NDArray[Any]]


def vectors(count: int = 90) -> Arrays:
    generator = np.random.default_rng(1)
    return generator.normal(size=(count, 6)), generator.integers(CLASSES, size=count)


def sequential(*layers: Any) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*layers)
    return initialise(net, 3)  # type: ignore[no-any-return]


def mlp(*, dropout: float = 0.0, norm: bool = False) -> nn.HybridSequential:
    middle = [*([nn.BatchNorm(in_channels=8)] if norm else []), nn.Activation("tanh")]
    middle += [nn.Dropout(dropout)] if dropout else []
    return sequential(nn.Dense(8, in_units=6), *middle, nn.Dense(CLASSES, in_units=8))


class Branching(gluon.Block):  # type: ignore[misc]
    """A layer that is never used, and one that only shards with an even number of samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = initialise(nn.Dense(2, in_units=2), 1)
        self.rarely = initialise(nn.Dense(CLASSES, in_units=CLASSES), 1)

    def forward(self, X: Any) -> Any:
        scores = self.used(X)
        # A sample's own number decides, so that a shard of the others alone does not touch the layer at all.
        chosen = X[:, 0:1] > 1.5
        if not chosen.asnumpy().any():
            return scores
        chosen = chosen.astype(scores.dtype)
        return chosen * self.rarely(scores) + (1 - chosen) * scores


def contexts(count: int) -> list[mx.Context]:
    return [mx.cpu(number) for number in range(count)]


def fit(model: Any, data: Any, devices: int = 1, **options: Any) -> tuple[dict[str, NDArray[Any]], Result]:
    """Train on a number of devices; gives copies of the weights, and the result."""
    given = {"max_epochs": 2, "batch_size": 16, "quiet": True, **options}
    if not isinstance(given.get("optimizer"), (mx.optimizer.Optimizer, gluon.Trainer)):
        given.setdefault("lr", 0.1)
    model.cast("float64")
    result = Trainer(devices=contexts(devices), **given).fit(model, data)
    return replicas.model_tensors(model), result


def rows(result: Result) -> list[dict[str, Any]]:
    """The rows of a result without what the clock says."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.rows]


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
