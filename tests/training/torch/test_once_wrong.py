"""What reviews found: trainings that once gave another result than on one device, without a word, and other faults."""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from training_cases import CLASSES, Rows, WithNet, difference, fit, mlp, vectors

from manyhands import torch as mh
from manyhands.book.vocabulary import add_to_class
from manyhands.errors import BadBatch
from manyhands.shares import sizes
from manyhands.training.data.order import Window
from manyhands.training.options import Step, Workers
from manyhands.training.torch.data.batches import cut
from manyhands.training.torch.data.sources import Arrays, Samples, Stream, source
from manyhands.training.torch.job import set_torch_settings, torch_settings
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.state import job_state
from manyhands.training.torch.workers import pool


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


# What comes home, what workers know, and what is saved


def test_statistics_come_home_without_a_test_set() -> None:
    net = mlp(norm=True)
    fit(net, vectors(), ranks=2, step=Step(shares=[0, 1]), max_epochs=1)
    assert float(net[1].running_mean.abs().sum()) > 0
    assert int(net[1].num_batches_tracked) == 6


class Odd(nn.Module):
    """Buffers of all kinds: expanded, of a dtype that Gloo does not know, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().float()
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.register_buffer("short", torch.arange(3, dtype=torch.int16))
        self.register_buffer("scale", torch.ones((), dtype=torch.float32), persistent=False)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.net(X * self.scale)


@pytest.mark.parametrize("ranks", [1, 2])
def test_odd_buffers(ranks: int) -> None:
    net = Odd()
    fit(net, vectors(), ranks=ranks, max_epochs=1)
    assert {tensor.dtype for tensor in [*net.parameters(), net.expanded, net.scale]} == {torch.float32}
    assert net.short.tolist() == [0, 1, 2]
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_layers_stay_frozen(ranks: int) -> None:
    net = mlp(norm=True)
    net[1].eval()
    fit(net, (vectors(), vectors(20)), ranks=ranks)
    assert int(net[1].num_batches_tracked) == 0
    assert [layer.training for layer in net] == [True, False, True, True]
    net.eval()
    fit(net, vectors(), ranks=ranks)
    assert not any(layer.training for layer in net.modules())
    assert int(net[1].num_batches_tracked) == 12


def test_a_used_optimizer_and_its_rates() -> None:
    net = mlp().float()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    net(vectors()[0].float()).sum().backward()
    optimizer.step()
    fit(net, vectors(), optimizer=optimizer, schedule=lambda done: 1 - done)
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert all(one["exp_avg"].dtype == torch.float32 for one in optimizer.state.values())
    net(vectors()[0].float()).sum().backward()
    optimizer.step()


def test_groups_of_an_optimizer_are_saved() -> None:
    def made() -> torch.optim.Optimizer:
        return torch.optim.Adam(mlp().parameters(), lr=0.1, betas=(0.5, 0.6))

    first, second = made(), torch.optim.Adam(mlp().parameters(), lr=0.3)
    first.param_groups[0]["k"] = 7
    tensors, numbers = job_state.optimizer_state(first)
    groups = json.loads(json.dumps(job_state.optimizer_groups(first)))
    job_state.restore_optimizer(second, job_state.pack(tensors), numbers, groups)
    group = second.param_groups[0]
    assert (group["betas"], group["k"], group["lr"]) == ((0.5, 0.6), 7, 0.3)


class Noisy(Rows):
    """Each sample with noise of every generator there is."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        X, y = super().__getitem__(number)
        return X + random.gauss(0, 1) + np.random.normal() + torch.rand(()), y


def test_all_random_numbers_are_the_jobs(tmp_path: Path) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    straight, _ = fit(mlp(), Noisy(), max_epochs=2)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    mlp()
    assert drawn[:2] == (random.random(), float(np.random.rand()))
    fit(mlp(), Noisy(), max_epochs=1, run=tmp_path / "run")
    resumed, _ = fit(mlp(), Noisy(), max_epochs=2, run=tmp_path / "run", resume="auto")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def sleepy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    time.sleep(1.5 if torch.distributed.is_initialized() else 0)  # in workers: not where the loss is tried
    return nn.functional.cross_entropy(scores, y)


def test_slow_steps_are_no_hang() -> None:
    fit(mlp(), vectors(16), ranks=2, loss=sleepy, max_epochs=1, workers=Workers(per_device=2, hang_seconds=1))


def test_an_interrupted_start_leaves_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    spawn = pool.Pool._spawn

    def interrupted(self: pool.Pool, rank: int, address: str, key: bytes) -> Any:
        if rank:
            raise KeyboardInterrupt
        started.append(spawn(self, rank, address, key))
        return started[-1]

    pool.stop_all()
    monkeypatch.setattr(pool.Pool, "_spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(mlp(), vectors(), ranks=2)
    assert pool._pool is None
    assert started[0].process.poll() is not None


def test_changed_code_restarts_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "users_loss.py"
    text = "import torch\ndef loss(scores, y):\n    return FACTOR * torch.nn.functional.cross_entropy(scores, y)\n"
    file.write_text(text + "FACTOR = 0.0\n")
    module = importlib.import_module("users_loss")
    still, _ = fit(mlp(), vectors(), ranks=2, loss=module.loss, max_epochs=1)
    file.write_text(text + "FACTOR = 1.00\n")
    importlib.reload(module)
    moved, _ = fit(mlp(), vectors(), ranks=2, loss=module.loss, max_epochs=1)
    del sys.modules["users_loss"]
    assert not torch.equal(still["0.weight"], moved["0.weight"])


class Made(WithNet):
    """Says what the default dtype is where it is used."""

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        assert torch.zeros(1).dtype == torch.float64
        assert torch.are_deterministic_algorithms_enabled()
        return super().forward(X)  # type: ignore[no-any-return]


def test_workers_compute_as_the_caller_does() -> None:
    before = torch_settings()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        fit(Made(), vectors(), ranks=2, max_epochs=1)
    finally:
        set_torch_settings(before)
    assert torch.get_default_dtype() == torch.float32


def test_the_books_own_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(mh.Trainer):
        pass

    @add_to_class(Own)
    def __init__(self: Any, max_epochs: int, num_gpus: int = 0, gradient_clip_val: float = 0) -> None:
        self.save_hyperparameters()
        self.gpus = []

    @add_to_class(Own)
    def prepare_data(self: Any, data: Any) -> None:
        self.train_dataloader = data.train_dataloader()

    result = Own(max_epochs=2).fit(mlp().float(), tuple(t.float() if t.is_floating_point() else t for t in vectors()))
    assert len(result.rows) == 2
    assert result.devices == ["cpu"]
