"""The contract suite in PyTorch's words: random trainings (see :mod:`random_jobs`), and what single tests need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchmetrics
from random_jobs import CLASSES, FEATURES, PADDING, WORDS, Batches, LossKind, ModelKind
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.torch import LossSum

without: frozenset[str] = frozenset()
channels_first = True
float64 = nullcontext
WIDE = 5


def seeded(kind: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Drawn anew at every call, by the same numbers."""

    def make() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return kind(*arguments).double()

    return make


def sequential(*layers: Callable[[], Any]) -> Callable[[], Any]:
    return seeded(lambda: nn.Sequential(*(layer() for layer in layers)))


def dense(width: int, inputs: int, **options: Any) -> Callable[[], Any]:
    return lambda: nn.Linear(inputs, width, **options)


class Tied(nn.Module):
    """One layer used twice, one frozen, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.unused, self.last = nn.Linear(2, 2), nn.Linear(FEATURES, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, X: Any) -> Any:
        return self.last(self.twice(self.twice(self.frozen(X)).tanh()).tanh())


class Tagger(nn.Module):
    """Scores for every word of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, CLASSES)

    def forward(self, X: Any) -> Any:
        return self.scores(self.words(X).tanh())


class Stepping(Tagger):
    """Says itself what a step is; its mean is PyTorch's own, over the words that are not padding."""

    def training_step(self, batch: Any) -> Any:
        return of_words(self(batch[0]), batch[1])


class Reader(nn.Module):
    """A recurrent net over a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, WIDE), nn.LSTM(WIDE, 4, batch_first=True)
        self.scores = nn.Linear(4, CLASSES)

    def forward(self, X: Any) -> Any:
        return self.scores(self.cells(self.words(X))[0][:, -1])


models = {
    "mlp": ModelKind(sequential(dense(WIDE, FEATURES), nn.Tanh, dense(CLASSES, WIDE))),
    "batch norm": ModelKind(
        sequential(dense(WIDE, FEATURES, bias=False), lambda: nn.BatchNorm1d(WIDE), nn.Tanh, dense(CLASSES, WIDE)),
        mixes=True,
    ),
    "dropout": ModelKind(sequential(dense(WIDE, FEATURES), lambda: nn.Dropout(0.4), dense(CLASSES, WIDE)), draws=True),
    "convolutions": ModelKind(
        sequential(lambda: nn.Conv2d(1, 4, 3), nn.ReLU, lambda: nn.MaxPool2d(2), nn.Flatten, dense(CLASSES, 16)),
        inputs="images",
    ),
    "tied, frozen, unused": ModelKind(seeded(Tied)),
    "recurrent": ModelKind(seeded(Reader), inputs="words"),
    "tagger": ModelKind(seeded(Tagger), inputs="words", gives="scores of words"),
    "training_step, mean": ModelKind(seeded(Stepping), inputs="words", step="words"),
}

CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.3], dtype=torch.float64)


def of_words(output: Any, target: Any) -> Any:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def weighed_sum(output: Any, target: Any) -> LossSum:
    weights = CLASS_WEIGHTS[target]
    return LossSum((F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


losses = {
    "default": LossKind(None),
    "weighed classes, an object": LossKind(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2)),
    "weighed classes, LossSum": LossKind(weighed_sum),
    "MSE": LossKind(nn.MSELoss(), targets="numbers"),
    "Huber, every number": LossKind(nn.HuberLoss(reduction="none"), targets="numbers"),
    "words, PyTorch's mean": LossKind(of_words, targets="words", takes="scores of words"),
}


class Made:
    """An optimizer of a model's parameters: something that goes to other processes."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options

    def __call__(self, parameters: Any) -> Any:
        return self.kind(parameters, **self.options)


optimizers: dict[str, Callable[[float], Any]] = {
    "momentum, decay": lambda rate: Made(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda rate: Made(torch.optim.SGD, lr=rate, momentum=0.9, nesterov=True),
    "adamw, amsgrad": lambda rate: Made(torch.optim.AdamW, lr=rate, amsgrad=True),
}


class Rows(Dataset[Any]):
    def __init__(self, X: Any, y: Any) -> None:
        self.X, self.y = X, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> Any:
        return self.X[number], self.y[number]


class InOrder(IterableDataset[Any]):
    def __init__(self, X: Any, y: Any) -> None:
        self.X, self.y = X, y

    def __iter__(self) -> Any:
        return iter(zip(self.X, self.y, strict=True))


def tensors(X: Any, y: Any) -> Any:
    return torch.from_numpy(X), torch.from_numpy(y)


data: dict[str, tuple[Callable[..., Any], bool]] = {
    "arrays": (lambda X, y, size, train: (np.array(X), np.array(y)), False),
    "TensorDataset": (lambda X, y, size, train: TensorDataset(*tensors(X, y)), False),
    "Dataset": (lambda X, y, size, train: Rows(*tensors(X, y)), False),
    "DataLoader": (lambda X, y, size, train: DataLoader(Rows(*tensors(X, y)), size, shuffle=train), True),
    "DataLoader, in order": (lambda X, y, size, train: DataLoader(Rows(*tensors(X, y)), size), True),
    "DataLoader, iterable": (lambda X, y, size, train: DataLoader(InOrder(*tensors(X, y)), size), True),
    "batches": (lambda X, y, size, train: Batches(*tensors(X, y), size), False),
}  # fmt: skip


own = SimpleNamespace(
    array=torch.from_numpy,
    scores=lambda model, X: model.eval()(X).detach().numpy(),
    adam=torch.optim.Adam,
    loss=lambda scores, y: F.cross_entropy(scores, y) * 2,
    root_loss=lambda scores, y: (scores**2).mean().sqrt(),
    squares=[(nn.MSELoss, 1), (nn.MSELoss(), 1), (F.mse_loss, 1)],
    metric=torchmetrics.Accuracy("multiclass", num_classes=10, average="micro"),
    share_right=lambda scores, y: (scores.argmax(1) == y).float().mean(),
    normalising=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
)
