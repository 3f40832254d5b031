"""Small models, data and a short way to train them, for the tests of training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler

from manyhands.training.options import Workers
from manyhands.training.result import Result
from manyhands.training.torch.trainer import Trainer

CLASSES = 3


def vectors(count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(CLASSES, (count,), generator=generator)


def images(count: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(CLASSES, (count,), generator=generator)


def mlp(*, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    middle = [*([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, CLASSES)).double()


def convnet() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


class Branching(nn.Module):
    """A layer that is never used, and one that only samples with a large first number use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Linear(2, 2).double()
        self.rarely = nn.Linear(CLASSES, CLASSES).double()

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.used(X)
        chosen = X[:, 0] > 1.5
        return torch.where(chosen[:, None], self.rarely(scores), scores) if bool(chosen.any()) else scores


class WithNet(nn.Module):
    """A model with an MLP in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = mlp(**options)

    def forward(self, X: torch.Tensor) -> Any:
        return self.net(X)


class WithOptimizer(WithNet):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Rows(Dataset[Any]):
    """Samples by number, that write down each number that is asked for (one file per process)."""

    def __init__(self, count: int = 90, log: Path | None = None) -> None:
        self.X, self.y = vectors(count)
        self.log = log

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.log is not None:
            with (self.log / f"{os.getpid()}").open("a") as file:
                file.write(f"{number}\n")
        return self.X[number], self.y[number]


class Endless(IterableDataset[Any]):
    """Samples one after the other, in an order of their own."""

    def __init__(self, count: int = 90) -> None:
        self.count = count

    def __iter__(self) -> Any:
        X, y = vectors(self.count)
        return iter(zip(X, y, strict=True))


class Batches:
    """Nothing but batches to iterate over."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Chunks:
    """Nothing but something to iterate over: batches."""

    def __init__(self, X: torch.Tensor, y: torch.Tensor, size: int) -> None:
        self.X, self.y, self.size = X, y, size

    def __iter__(self) -> Any:
        return zip(self.X.split(self.size), self.y.split(self.size), strict=True)


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count - 1, -1, -1))


class SumsUp(nn.Module):
    """A model whose weights show which samples were trained on: the gradient of the loss is its input.

    With plain SGD of rate 1 and a batch of size n, each step adds the one-hot rows of its samples, divided by n.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(count, dtype=torch.float64))

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return -(X @ self.seen)


def one_hot(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)


def mean_output(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.mean()


class OneHot(Dataset[Any]):
    """The one-hot rows as a dataset; on one rank it may do harm when a number is asked for."""

    def __init__(self, count: int, harm: Any = None) -> None:
        self.count, self.harm = count, harm

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.harm is not None:
            self.harm(number)
        X, y = torch.zeros(self.count, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        X[number] = 1
        return X, y


class Harm:
    """What a rank does when the sample is asked for: kill itself, sleep for ever, or raise. Once, if given a file."""

    def __init__(self, kind: str, number: int, once: Path | None = None) -> None:
        self.kind, self.number, self.once = kind, number, once
        self.home = os.getpid()

    def __call__(self, number: int) -> None:
        if number != self.number or (self.once is not None and self.once.exists()):
            return
        if self.kind == "hang" and os.getpid() == self.home:  # the caller, who looks at samples before the job
            return
        if self.once is not None:
            self.once.touch()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "hang":
            time.sleep(1000)
        raise ValueError(f"sample {number} is spoilt")


def fit(model: nn.Module, data: Any, ranks: int = 1, **options: Any) -> tuple[dict[str, torch.Tensor], Result]:
    """Train on a number of ranks; gives copies of the weights, and the result."""
    given = {"max_epochs": 2, "precision": "fp64", "quiet": True, **options}
    loader = data[0] if isinstance(data, tuple) else data
    if getattr(loader, "batch_size", None) is None and hasattr(loader, "__getitem__"):  # a loader has one already
        given.setdefault("batch_size", 16)
    if given.get("optimizer") is None and not isinstance(model, WithOptimizer):
        given.setdefault("lr", 0.1)
    given.setdefault("workers", Workers(per_device=ranks))
    result = Trainer(devices=["cpu"], **given).fit(model, data)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in tensors.items()}, result


def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor, by norm; absolute for what is zero up to noise."""
    assert first.keys() == second.keys()
    return max(
        float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-3))
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


def rows(result: Result) -> list[dict[str, Any]]:
    """The rows of a result without what the clock says."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.rows]
