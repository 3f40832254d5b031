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
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from training_cases import CLASSES, Rows, difference, fit, mlp, vectors

from manyhands.errors import BadBatch, BadSettings
from manyhands.shares import sizes
from manyhands.training.data.order import Window
from manyhands.training.options import Settings, Step
from manyhands.training.torch.data.batches import cut
from manyhands.training.torch.data.sources import Arrays, Samples, Stream, source
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.preflight.loss_trial import check_loss
from manyhands.training.torch.ranks import global_batch_norm
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


def test_normalisation_has_a_group_of_its_own(alone: None) -> None:
    model = mlp(norm=True)
    global_batch_norm.use_global_statistics(model)
    first = global_batch_norm._group
    assert first not in (None, dist.group.WORLD)
    global_batch_norm.use_global_statistics(model)
    assert global_batch_norm._group is first
    X, _ = vectors(8)
    expected = mlp(norm=True)(X)
    assert torch.allclose(model(X), expected)


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


def columns(samples: list[Any]) -> Any:
    X, y = default_collate(samples)
    return X.T, y


def test_batches_that_the_model_does_not_take() -> None:
    with pytest.raises(BadBatch, match=r"takes 6 numbers per sample.*shape \(6, 4\)"):
        fit(mlp(), DataLoader(Rows(), batch_size=16, collate_fn=columns), 1)


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


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def averaged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def job(loss: Any, data: Any, model: nn.Module | None = None, **options: Any) -> Job:
    model = model or mlp(dropout=0.5)
    return Job(model, objective_for(model, loss), source(data), None, Settings(1, 8, **options), torch.optim.SGD)  # type: ignore[arg-type]


def with_ignored() -> tuple[torch.Tensor, torch.Tensor]:
    X, y = vectors()
    y[50] = -100
    return X, y


GOOD = [None, averaged, nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none")]
WEIGHTED = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize("loss", GOOD)
def test_losses_that_are_means(loss: Any) -> None:
    for data in (vectors(), Rows(), DataLoader(Rows(), 8, drop_last=True)):
        tried = job(loss, data)
        check_loss(tried.model, tried, 2, torch.device("cpu"))
        assert tried.model.training


@pytest.mark.parametrize(("loss", "data"), [(WEIGHTED, vectors()), (WEIGHTED, Rows()), (None, with_ignored())])
def test_losses_that_are_taken_apart(loss: Any, data: Any) -> None:
    tried = job(loss, data)
    check_loss(tried.model, tried, 2, torch.device("cpu"))
    assert tried.objective.sums is True


@pytest.mark.parametrize(("loss", "data"), [(summed, vectors()), (summed, Rows())])
def test_losses_that_are_no_means(loss: Any, data: Any) -> None:
    tried = job(loss, data)
    check_loss(tried.model, tried, 2, torch.device("cpu"))
    assert tried.objective.rows is not None  # outputs and targets are gathered, and the sum is that of the whole batch
    tried = job(loss, data, step=Step(accumulate=2))
    with pytest.raises(BadSettings, match="accumulate"):
        check_loss(tried.model, tried, 1, torch.device("cpu"))


class Noisy(nn.Module):
    """A loss that draws random numbers; and a step that counts."""

    def __init__(self, factor: float = 0.0, reduction: str = "sum") -> None:
        super().__init__()
        self.net, self.factor, self.reduction, self.steps = mlp(), factor, reduction, 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.steps += 1
        noise = self.factor * torch.randn_like(batch["X"])
        return nn.functional.cross_entropy(self.net(batch["X"] + noise), batch["y"], reduction=self.reduction)


class Dicts(Rows):
    def __getitem__(self, number: int) -> Any:
        return {"X": self.X[number], "y": self.y[number]}


def test_the_loss_of_a_training_step() -> None:
    tried = job(None, Dicts(), Noisy())
    with pytest.raises(BadSettings, match="mean over the samples"):
        check_loss(tried.model, tried, 2, torch.device("cpu"))
    assert tried.model.steps == 0
    for reduction in ("sum", "mean"):
        noisy = job(None, Dicts(), Noisy(0.1, reduction))
        check_loss(noisy.model, noisy, 2, torch.device("cpu"))
        assert any("draws random numbers" in note for note in noisy.notes)


class OfDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: Any) -> torch.Tensor:
        assert type(batch) is dict
        return nn.functional.cross_entropy(self.net(batch["X"]), batch["y"])


def test_dict_batches() -> None:
    expected, _ = fit(mlp(), vectors(), 1)
    stream = DataLoader(Dicts(80), 16, drop_last=True)
    for ranks in (1, 2):
        weights, _ = fit(OfDicts(), Dicts(), ranks)
        assert difference(expected, {name.removeprefix("net."): value for name, value in weights.items()}) <= 1e-12
        fit(OfDicts(), stream, ranks, step=Step(accumulate=2))
    with pytest.raises(BadBatch, match="a batch is a dict with 'X', 'y', and each part is given to the model by name"):
        fit(mlp(), Dicts())


def test_a_loss_that_refuses_autocast() -> None:
    X, y = vectors()
    model = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0))
    seen = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((output.dtype, torch.is_autocast_enabled("cpu")))
        return nn.BCELoss()(output, target)

    fit(model, (X.float(), (y > 0).float()), 1, precision="bf16", loss=loss)
    assert set(seen) == {(torch.float32, False)}
