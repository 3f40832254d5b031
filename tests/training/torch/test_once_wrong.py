"""Trainings that once gave another result than on one device, without a word: now they are the same, or refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from training_cases import CLASSES, Rows, difference, fit, mlp, vectors

from manyhands.errors import BadBatch
from manyhands.shares import sizes
from manyhands.training.data.order import Window
from manyhands.training.options import Step
from manyhands.training.torch.data.batches import cut
from manyhands.training.torch.data.sources import Arrays, Samples, Stream, source
from manyhands.training.torch.ranks.gradient_sum import GradientSum


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# What ranks do together


class LateBranch(nn.Module):
    """Normalisation, and after it a large layer that only some samples use: its bucket is full on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()
        self.rarely = nn.Linear(CLASSES, 50_000).double()

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(X)
        chosen = X[:, :1] > 1.0
        return scores + chosen * self.rarely(scores).mean(1, keepdim=True) if bool(chosen.any()) else scores


def test_statistics_and_sums_of_gradients_do_not_meet() -> None:
    options: dict[str, Any] = {"batch_size": 6, "max_epochs": 1, "step": Step(batch_stats="global")}
    one, _ = fit(LateBranch(), vectors(), 1, **options)
    two, _ = fit(LateBranch(), vectors(), 2, **options)
    assert difference(one, two) <= 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_layer_in_checkpoints(reentrant: bool, alone: None) -> None:
    layer = nn.Linear(4, 4)
    gradients = GradientSum(layer.parameters())
    x = torch.randn(3, 4, requires_grad=True)

    def backward() -> None:
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=reentrant), use_reentrant=reentrant)
        y.sum().backward()

    gradients.begin()
    gradients.arm(True)
    if reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            backward()
        return
    backward()
    gradients.sum_up()
    expected = torch.autograd.grad(layer(layer(x)).sum(), list(layer.parameters()))
    assert all(torch.allclose(p.grad, g) for p, g in zip(layer.parameters(), expected, strict=True))  # type: ignore[arg-type]


# Where samples come from


class Negated(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        X, y = super().__getitem__(index)
        return -X, y


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield from super().__iter__()


class Upwards(RandomSampler):
    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__()))


def test_a_subclass_is_asked_and_not_guessed() -> None:
    plain, negated = TensorDataset(*vectors()), Negated(*vectors())
    assert isinstance(source(plain), Arrays)
    assert isinstance(source(negated), Samples)
    assert isinstance(source(DataLoader(negated, batch_size=8)), Samples)
    assert isinstance(source(Twice(plain, batch_size=8)), Stream)
    assert isinstance(source(DataLoader(plain, batch_size=8, sampler=Upwards(plain))), Stream)
    one, _ = fit(mlp(), negated, 1)
    X, y = vectors()
    assert difference(one, fit(mlp(), (-X, y), 1)[0]) <= 1e-12


def test_a_loader_keeps_its_workers_options() -> None:
    loader = DataLoader(
        Rows(), 8, num_workers=1, prefetch_factor=3, timeout=50, multiprocessing_context="fork", persistent_workers=True
    )
    found = source(loader)
    assert isinstance(found, Samples)
    kept = {"persistent_workers": True, "prefetch_factor": 3, "timeout": 50}
    assert found.options == {"multiprocessing_context": "fork", **kept}
    assert difference(fit(mlp(), loader, 1)[0], fit(mlp(), DataLoader(Rows(), 8), 1)[0]) <= 1e-12


def test_a_distributed_sampler() -> None:
    dataset = Rows()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(BadBatch, match="shuffle=True"):
        fit(mlp(), DataLoader(dataset, batch_size=8, sampler=sampler))


def test_a_batch_is_cut_by_samples() -> None:
    Pair = namedtuple("Pair", "x names")
    x = torch.arange(6.0).reshape(3, 2)
    part = cut({"pair": Pair(x, ["a", "b", "c"]), "kinds": ["one", "two"], "rate": torch.tensor(2.0)}, 1, 3)
    assert torch.equal(part["pair"].x, x[1:])
    assert (part["pair"].names, part["kinds"], float(part["rate"])) == (["b", "c"], ["one", "two"], 2.0)
    whole = [x, torch.zeros(2, 3)]
    assert cut(whole, 0, 3) is whole
    with pytest.raises(BadBatch, match=r"3 samples.*\(2, 3\).*batch-first"):
        cut(whole, 0, 2)


def test_shards_of_one_sample_go_to_a_neighbour() -> None:
    assert sizes(3, 2) == [2, 1]
    assert sizes(3, 2, least=2) == [3, 0]
    assert sizes(2, 2, least=2) == [2, 0]
    assert sizes(1, 2, least=2) == [1, 0]
    assert sizes(5, 3, [0, 1, 4], least=2) == [0, 0, 5]
    window = Window(0, 10, 13, 0)
    assert [window.part(rank, 2, least=2) for rank in (0, 1)] == [(10, 13), (13, 13)]
    for total in range(40):
        for shares in (None, [3, 1, 1, 9]):
            given = sizes(total, 4, shares, least=2)
            assert sum(given) == total
            assert all(size != 1 for size in given) or total == 1


# The loss


def test_a_loss_that_refuses_autocast() -> None:
    X, y = vectors()
    model = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0))
    seen = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
        return nn.BCELoss()(output, target)

    fit(model, (X.float(), (y > 0).float()), 1, precision="bf16", loss=loss)
    assert set(seen) == {(torch.float32, False)}
