"""Batches of any form: what is not cut needs no rows, and what is collated part by part is never cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training_cases import CLASSES, difference, fit, rows

from manyhands.errors import BadBatch, BadSettings
from manyhands.training.options import Step

CLOSE = 1e-12
LENGTH = 4


class Sequences(Dataset[Any]):
    """Samples of several steps (of several nodes, where they are graphs)."""

    def __init__(self, count: int = 40, *, uneven: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = [2 + number % 3 if uneven else LENGTH for number in range(count)]
        self.X = [torch.randn(length, 6, generator=generator, dtype=torch.float64) for length in lengths]
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.X[number], self.y[number]


def time_major(samples: list[Any]) -> Any:
    X, y = zip(*samples, strict=True)
    return torch.stack(X, dim=1), torch.stack(y)


def concatenated(samples: list[Any]) -> Any:
    """The nodes of all graphs one after the other, and the graph that each belongs to."""
    X, y = zip(*samples, strict=True)
    graphs = torch.arange(len(X)).repeat_interleave(torch.tensor([len(nodes) for nodes in X]))
    return torch.cat(X), graphs, torch.stack(y)


def with_mask(samples: list[Any]) -> Any:
    X, y = zip(*samples, strict=True)
    return torch.stack(X), torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril(), torch.stack(y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = nn.GRU(6, 8), nn.Linear(8, CLASSES)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(X)[0][-1])  # type: ignore[no-any-return]


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nodes, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, X: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        nodes = self.nodes(X).tanh()
        return self.head(nodes.new_zeros(int(graphs[-1]) + 1, 8).index_add(0, graphs, nodes))  # type: ignore[no-any-return]


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, X: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head((mask @ X).tanh().mean(1))  # type: ignore[no-any-return]


CASES = {
    "time-major": (Recurrent, Sequences(), time_major),
    "graphs": (Graphs, Sequences(uneven=True), concatenated),
    "a mask": (Causal, Sequences(), with_mask),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_collate_function_makes_is_never_cut(name: str) -> None:
    """Equal on devices and in micro-batches, each of which is collated from its own samples; every sample counts."""
    model, dataset, collate = CASES[name]

    def trained(ranks: int, **step: Any) -> tuple[dict[str, torch.Tensor], Any]:
        loader = DataLoader(dataset, batch_size=12, collate_fn=collate, shuffle=True)
        return fit(model().double(), (loader, loader), ranks, step=Step(**step))

    weights, result = trained(1)
    assert [row["samples"] for row in result.rows] == [40, 40]
    for ranks, step in ((2, {}), (1, {"accumulate": 3}), (2, {"accumulate": 2, "shares": [3, 1]})):
        divided, metrics = trained(ranks, **step)
        assert difference(weights, divided) <= CLOSE, (ranks, step)
        for expected, row in zip(rows(result), rows(metrics), strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


class Loader:
    """Batches in an order of their own: these have to be cut."""

    def __init__(self, collate: Any, size: int) -> None:
        self.collate, self.size = collate, size

    def __iter__(self) -> Iterator[Any]:
        dataset = Sequences()
        for start in range(0, len(dataset), self.size):
            yield self.collate([dataset[number] for number in range(start, min(start + self.size, len(dataset)))])


@pytest.mark.parametrize("how", [{"ranks": 2}, {"step": Step(accumulate=2)}])
def test_a_loader_s_mask_is_not_cut_as_samples(how: dict[str, Any]) -> None:
    """Where it is longer than the batch it is not cut; where it is as long, the trial of the parts refuses it."""
    fit(Causal().double(), Loader(with_mask, LENGTH))
    with pytest.raises(BadSettings, match="not a mean over the samples"):
        fit(Causal().double(), Loader(with_mask, LENGTH), **how)
    with pytest.raises(BadBatch, match=r"5 samples.*\(4, 4\).*give a Dataset"):
        fit(Causal().double(), Loader(with_mask, 5), **how)


def test_square_samples_are_samples() -> None:
    """As many features as samples."""

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            yield torch.randn(6, 6, generator=generator).double(), torch.arange(6) % CLASSES

    weights = []
    for ranks in (1, 2):
        torch.manual_seed(0)
        weights.append(fit(nn.Linear(6, CLASSES).double(), batches, ranks)[0])
    assert difference(*weights) <= CLOSE


class GraphBatch:
    """An object that nobody can look into."""

    def __init__(self, samples: list[Any]) -> None:
        self.X, self.graphs, self.y = concatenated(samples)


class WithStep(Graphs):
    def training_step(self, batch: GraphBatch) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch.X, batch.graphs), batch.y)


def test_an_object_as_a_batch() -> None:
    """It has the samples that were collated into it."""
    plain = DataLoader(Sequences(uneven=True), batch_size=12, collate_fn=concatenated, shuffle=True)
    objects = DataLoader(Sequences(uneven=True), batch_size=12, collate_fn=GraphBatch, shuffle=True)
    weights, _ = fit(Graphs().double(), plain)
    for how in ({}, {"ranks": 2}, {"step": Step(accumulate=2)}):
        assert difference(weights, fit(WithStep().double(), objects, **how)[0]) <= CLOSE
    with pytest.raises(BadBatch, match="no tensor with samples"):
        fit(WithStep().double(), lambda: iter(objects), 2)


def all_but_one(samples: list[Any]) -> Any:
    return time_major(samples[1:] or samples)


def test_a_part_shows_its_samples() -> None:
    loader = DataLoader(Sequences(), batch_size=16, collate_fn=all_but_one)
    for how in ({"ranks": 2}, {"step": Step(accumulate=2)}):
        with pytest.raises(BadBatch, match=r"asked for 8 samples.*\(4, 7, 6\), \(7,\).*not in the collate function"):
            fit(Recurrent().double(), loader, **how)
