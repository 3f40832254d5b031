"""The contract suite in MXNet's words: random trainings (see :mod:`random_jobs`), and what single tests need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
from random_jobs import CLASSES, FEATURES, OWN_SCHEDULE, PADDING, WORDS, Batches, LossKind, ModelKind

from manyhands.book.mxnet import initialise
from manyhands.mxnet import LossSum

without = frozenset({"accumulate", "on_nan", "batch_stats='global'"})
channels_first = True
float64 = nullcontext
WIDE = 5


def sequential(*layers: Any) -> Callable[[], Any]:
    """Fresh layers at every call: what is given are functions that make them."""

    def make() -> Any:
        net = nn.HybridSequential()
        net.add(*(layer() for layer in layers))
        return in_float64(net)

    return make


def in_float64(net: Any) -> Any:
    mx.random.seed(3)  # for layers that draw their weights themselves
    initialise(net, 3)
    net.cast("float64")
    return net


def dense(width: int, inputs: int, **options: Any) -> Callable[[], Any]:
    return lambda: nn.Dense(width, in_units=inputs, **options)


def norm(width: int) -> Callable[[], Any]:
    return lambda: nn.BatchNorm(in_channels=width)


def tanh() -> Any:
    return nn.Activation("tanh")


class Tied(gluon.Block):  # type: ignore[misc]
    """One layer used twice, one frozen, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Dense(FEATURES, in_units=FEATURES)
        self.frozen = nn.Dense(FEATURES, in_units=FEATURES)
        self.unused = nn.Dense(2, in_units=2)
        self.last = nn.Dense(CLASSES, in_units=FEATURES)
        for parameter in self.frozen.collect_params().values():
            parameter.grad_req = "null"

    def forward(self, X: Any) -> Any:
        return self.last(self.twice(self.twice(self.frozen(X)).tanh()).tanh())


class Tagger(gluon.Block):  # type: ignore[misc]
    """Scores for every word of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE, dtype="float64")
        self.scores = nn.Dense(CLASSES, in_units=WIDE, flatten=False)

    def forward(self, X: Any) -> Any:
        return self.scores(self.words(X).tanh())


class Stepping(Tagger):
    """Says itself what a step is."""

    def training_step(self, batch: Any) -> Any:
        return of_words(self(batch[0]), batch[1])


class Reader(gluon.Block):  # type: ignore[misc]
    """A recurrent net over a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE, dtype="float64")
        self.cell = gluon.rnn.GRUCell(4, input_size=WIDE)
        self.scores = nn.Dense(CLASSES, in_units=4)

    def forward(self, X: Any) -> Any:
        begin = self.cell.begin_state(batch_size=len(X), ctx=X.ctx, dtype="float64")
        read, _ = self.cell.unroll(X.shape[1], self.words(X), begin, layout="NTC", merge_outputs=True)
        return self.scores(read[:, -1])


models = {
    "mlp": ModelKind(sequential(dense(WIDE, FEATURES), tanh, dense(CLASSES, WIDE))),
    "batch norm": ModelKind(
        sequential(dense(WIDE, FEATURES, use_bias=False), norm(WIDE), tanh, dense(CLASSES, WIDE)), mixes=True
    ),
    "dropout": ModelKind(sequential(dense(WIDE, FEATURES), lambda: nn.Dropout(0.4), dense(CLASSES, WIDE)), draws=True),
    "convolutions": ModelKind(
        sequential(
            lambda: nn.Conv2D(4, 3, in_channels=1),
            lambda: nn.Activation("relu"),
            lambda: nn.MaxPool2D(2),
            dense(CLASSES, 16),
        ),
        inputs="images",
    ),
    "tied, frozen, unused": ModelKind(lambda: in_float64(Tied())),
    "recurrent": ModelKind(lambda: in_float64(Reader()), inputs="words"),
    "tagger": ModelKind(lambda: in_float64(Tagger()), inputs="words", gives="scores of words"),
    "training_step": ModelKind(lambda: in_float64(Stepping()), inputs="words", step="words"),
}


softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def weighed(output: Any, target: Any) -> LossSum:
    weights = mx.nd.array([1.0, 5.0, 0.3], dtype="float64", ctx=target.ctx).take(target.astype("int32"))
    return LossSum((softmax(output, target) * weights).sum(), weights.sum())


def of_words(output: Any, target: Any) -> LossSum:
    there = (target != PADDING).astype("float64")
    each = -mx.nd.pick(mx.nd.log_softmax(output), mx.nd.maximum(target.astype("float64"), 0)) * there
    return LossSum(each.sum(), there.sum())


losses = {
    "default": LossKind(None),
    "weighed classes": LossKind(weighed),
    "L2": LossKind(gluon.loss.L2Loss(), targets="numbers"),
    "squares, mean": LossKind(lambda output, target: ((output - target) ** 2).mean(), targets="numbers"),
    "words": LossKind(of_words, targets="words", takes="scores of words"),
}

optimizers: dict[str, Callable[[float], Any]] = {
    "sgd": lambda rate: mx.optimizer.SGD(learning_rate=rate),
    "momentum, decay": lambda rate: mx.optimizer.SGD(learning_rate=rate, momentum=0.9, wd=0.01),
    "adam": lambda rate: mx.optimizer.Adam(learning_rate=rate),
    OWN_SCHEDULE: lambda rate: mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=rate)),
}


def loader(X: Any, y: Any, size: int, train: bool) -> Any:
    return gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), size)


def shuffling_loader(X: Any, y: Any, size: int, train: bool) -> Any:
    return gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), size, shuffle=train)


data: dict[str, tuple[Callable[..., Any], bool]] = {
    "arrays": (lambda X, y, size, train: (X, y), False),
    "MXNet's arrays": (
        lambda X, y, size, train: (mx.nd.array(X, dtype=X.dtype), mx.nd.array(y, dtype=y.dtype)),
        False,
    ),
    "ArrayDataset": (lambda X, y, size, train: gluon.data.ArrayDataset(X, y), False),
    "DataLoader": (loader, True),
    "DataLoader, shuffling": (shuffling_loader, True),
    "batches": (lambda X, y, size, train: Batches(X, y, size), False),
}


def normalising() -> Any:
    net = nn.HybridSequential()
    net.add(nn.Dense(6, in_units=4), nn.BatchNorm(in_channels=6), nn.Dense(3, in_units=6))
    return net


own = SimpleNamespace(
    array=mx.nd.array,
    scores=lambda model, X: model(X).asnumpy(),
    adam=mx.optimizer.Adam,
    loss=lambda scores, y: softmax(scores, y).mean() * 2,
    root_loss=lambda scores, y: (scores**2).mean().sqrt(),
    squares=[(gluon.loss.L2Loss, 0.5), (gluon.loss.L2Loss(), 0.5)],
    metric=mx.metric.Accuracy(),
    share_right=lambda scores, y: (scores.argmax(1).astype("int32") == y.astype("int32")).astype("float32").mean(),
    scheduled=lambda: mx.optimizer.SGD(
        learning_rate=0.1, momentum=0.9, lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5)
    ),
    normalising=normalising,
    tensors=lambda model: [parameter.data().asnumpy() for parameter in model.collect_params().values()],
    last_layer="last",
)
