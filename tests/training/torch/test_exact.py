"""The update on several ranks is that of one device, in float64 to 1e-12, whatever the division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from training_cases import (
    CLASSES,
    Backwards,
    Branching,
    Chunks,
    Endless,
    OneHot,
    Rows,
    SumsUp,
    WithOptimizer,
    convnet,
    difference,
    fit,
    images,
    mean_output,
    mlp,
    one_hot,
    rows,
    vectors,
)

from manyhands.errors import BadBatch
from manyhands.training.options import Step
from manyhands.training.schedules import one_cycle

CLOSE = 1e-12


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
adamw = partial(torch.optim.AdamW, lr=0.01)


def check(model: Callable[[], nn.Module], data: Any, ranks: int = 2, **options: Any) -> None:
    """The same training on one rank and on several: weights, buffers and metrics agree."""
    one = {**options, "step": replace(options.get("step", Step()), shares=None)}
    alone, metrics = fit(model(), data, 1, **one)
    together, shared = fit(model(), data, ranks, **options)
    assert difference(alone, together) <= CLOSE
    for row, other in zip(rows(metrics), rows(shared), strict=True):
        assert {name for name in row if row[name] is None} == {name for name in other if other[name] is None}
        known = [name for name in row if row[name] is not None]
        assert [row[name] for name in known] == pytest.approx([other[name] for name in known], rel=CLOSE)


DIVISIONS: dict[str, dict[str, Any]] = {
    "even": {"batch_size": 18},
    "uneven": {"batch_size": 15},
    "short last batch": {"batch_size": 16},
    "last batch of one": {"batch_size": 89},
    "shares": {"step": Step(shares=[0.7, 0.3])},
    "an empty shard": {"step": Step(shares=[1, 0])},
    "an empty first shard": {"step": Step(shares=[0, 1])},
    "accumulate": {"step": Step(accumulate=3), "optimizer": momentum},
    "accumulate more than there are": {"step": Step(accumulate=12, shares=[0.9, 0.1])},
    "clip": {"gradient_clip_val": 0.05, "step": Step(shares=[0.6, 0.4])},
    "momentum": {"optimizer": momentum, "step": Step(shares=[0.6, 0.4])},
    "adamw": {"optimizer": adamw, "step": Step(shares=[0.6, 0.4])},
    "schedule": {"schedule": one_cycle, "optimizer": momentum},
    "three, even": {"ranks": 3, "batch_size": 18},
    "three, uneven": {"ranks": 3, "batch_size": 16},
    "three, an empty shard": {
        "ranks": 3, "step": Step(shares=[0.5, 0.0, 0.5]), "gradient_clip_val": 0.1, "optimizer": adamw
    },
    "three, accumulate": {"ranks": 3, "step": Step(accumulate=3), "optimizer": momentum},
    "fewer samples than ranks": {"ranks": 3, "batch_size": 4, "max_epochs": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", DIVISIONS)
def test_several_ranks_are_one_device(name: str) -> None:
    check(mlp, (vectors(), vectors(37)), **{"max_epochs": 4, **DIVISIONS[name]})


@pytest.mark.parametrize(
    ("ranks", "shares"), [(2, None), (2, [0.7, 0.3]), (2, [1, 0]), (2, [0, 1]), (3, None), (3, [0, 0.3, 0.7])]
)
def test_batch_norm_over_the_whole_batch(ranks: int, shares: list[float] | None) -> None:
    how: dict[str, Any] = {"max_epochs": 5} if ranks == 2 else {"optimizer": momentum}
    step = Step(batch_stats="global", shares=shares)
    check(convnet, (images(62), images(21)), ranks, batch_size=15, step=step, **how)


def test_batch_norm_with_a_cumulative_average_and_without_weights() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)]
        return nn.Sequential(*layers, nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, CLASSES)).double()

    check(model, vectors(), step=Step(batch_stats="global", shares=[0.6, 0.4]))


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_parameters_that_are_not_used(optimizer: Any) -> None:
    """A parameter that no rank used has no gradient; not zero, for weight decay and momentum would move it."""
    check(Branching, vectors(), batch_size=6, optimizer=optimizer, step=Step(shares=[0.8, 0.2]))
    check(Branching, vectors(), batch_size=6, optimizer=optimizer, step=Step(accumulate=2))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_reduction_of_the_loss(reduction: str) -> None:
    expected, _ = fit(mlp(), vectors(), 1)
    for ranks in (1, 2):
        weights, result = fit(mlp(), vectors(), ranks, loss=nn.CrossEntropyLoss(reduction=reduction))
        assert any("multiply lr by the batch size" in note for note in result.notes) is (reduction == "sum")
        assert difference(expected, weights) <= CLOSE


def test_the_optimizer_in_three_ways() -> None:
    expected, _ = fit(mlp(), vectors(), 1, optimizer=torch.optim.AdamW, lr=0.02)
    for ranks in (1, 2):
        model = mlp()
        instance = torch.optim.AdamW(model.parameters(), lr=0.02)
        of_model, _ = fit(WithOptimizer(), vectors(), ranks)
        ways = [
            fit(model, vectors(), ranks, optimizer=instance)[0],
            fit(mlp(), vectors(), ranks, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02))[0],
            {name.removeprefix("net."): weight for name, weight in of_model.items()},
        ]
        assert all(difference(expected, weights) <= CLOSE for weights in ways)


def test_an_optimizer_that_was_used_goes_on() -> None:
    """Two fits with one optimizer: its state comes back from the workers, too."""
    trained = []
    for ranks in (1, 2):
        model = mlp()
        optimizer = momentum(model.parameters())
        fit(model, vectors(), ranks, optimizer=optimizer)
        trained.append(fit(model, vectors(), ranks, optimizer=optimizer)[0])
    assert difference(*trained) <= CLOSE


def test_lazy_layers() -> None:
    def lazy() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))

    dataset = TensorDataset(*vectors())
    for data in (vectors(), DataLoader(dataset, batch_size=16, collate_fn=default_reversed)):
        alone, _ = fit(lazy(), data, 1)
        together, _ = fit(lazy(), data, 2)
        assert difference(alone, together) <= 1e-7  # they are float32 again in the end


def default_reversed(samples: list[Any]) -> Any:
    """A collate function of the user's: the same samples from the last to the first."""
    return default_collate(samples[::-1])


COUNT = 43


def sources() -> dict[str, Any]:
    X, y = one_hot(COUNT)
    dataset = TensorDataset(X, y)
    return {
        "tensors": (X, y),
        "arrays": (X.numpy(), y.numpy()),
        "TensorDataset": dataset,
        "map dataset": OneHot(COUNT),
        "loader": DataLoader(dataset, batch_size=8),
        "shuffled loader": DataLoader(dataset, batch_size=8, shuffle=True),
        "loader of a map dataset": DataLoader(OneHot(COUNT), batch_size=8, shuffle=True),
        "collate": DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=default_reversed),
        "workers": DataLoader(OneHot(COUNT), batch_size=8, shuffle=True, num_workers=2),
        "own sampler": DataLoader(dataset, batch_size=8, sampler=Backwards(COUNT)),
        "random batches": DataLoader(
            dataset, batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(dataset), 8, False)
        ),
        "own generator": DataLoader(
            dataset, batch_sampler=torch.utils.data.BatchSampler(
                torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(1)), 8, False)
        ),
        "a loader of one's own": Chunks(X, y, 8),
    }  # fmt: skip


@pytest.mark.parametrize("name", sources())
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_once_per_epoch(name: str, ranks: int) -> None:
    """Each sample of a full batch adds 1/8 to its weight, each of the short last batch 1/3."""
    model = SumsUp(COUNT)
    trained, result = fit(model, sources()[name], ranks, max_epochs=1, lr=1.0, batch_size=8, loss=mean_output)
    parts = sorted(trained["seen"].tolist())
    assert parts == pytest.approx([1 / 8] * 40 + [1 / 3] * 3)
    assert result.rows[0]["samples"] == COUNT


def test_loader_processes_outlive_the_groups_of_earlier_jobs() -> None:
    """The forks of a loader inherit what is left of the process groups of the jobs before."""
    for _ in range(4):
        _, result = fit(SumsUp(COUNT), sources()["workers"], 2, max_epochs=1, lr=1.0, loss=mean_output)
        assert result.rows[0]["samples"] == COUNT


def test_a_loader_that_drops_the_last_batch_and_shuffles() -> None:
    """Every rank must see the loader's batches in the same order, or samples come twice and others never."""
    loader = DataLoader(TensorDataset(*one_hot(COUNT)), batch_size=8, shuffle=True, drop_last=True)
    for ranks in (1, 2):
        trained, _ = fit(SumsUp(COUNT), loader, ranks, max_epochs=1, lr=1.0, loss=mean_output)
        assert sorted(trained["seen"].tolist()) == pytest.approx([0.0] * 3 + [1 / 8] * 40)


class Unseeded(Chunks):
    """It shuffles by a generator of its own, which is another one on every rank."""

    def __iter__(self) -> Any:
        order = torch.from_numpy(np.random.default_rng().permutation(len(self.y)))
        return zip(self.X[order].split(self.size), self.y[order].split(self.size), strict=True)


def test_ranks_that_are_given_different_batches() -> None:
    with pytest.raises(BadBatch, match=r"different batches \(noticed after sample 8 of epoch 1"):
        fit(mlp(), Unseeded(*vectors(), 8), 2)


def test_an_iterable_dataset() -> None:
    loader = DataLoader(Endless(), batch_size=16)
    check(mlp, loader, max_epochs=2)


def test_a_dataset_is_arrays() -> None:
    arrays, _ = fit(mlp(), vectors(), 1)
    for ranks in (1, 2):
        assert difference(arrays, fit(mlp(), Rows(), ranks)[0]) <= CLOSE


@pytest.mark.parametrize("count", [1, 2, 7, 513, 1025])
def test_evaluation_counts_each_sample_once(count: int) -> None:
    for ranks in (1, 2):
        model = mlp()
        _, result = fit(model, (vectors(20), vectors(count)), ranks, max_epochs=1, lr=0.0)
        X, y = vectors(count)
        answers = model.eval()(X).detach()
        assert result.rows[0]["val_acc"] == float((answers.argmax(1) == y).sum()) / count
        assert result.rows[0]["val_loss"] == pytest.approx(float(nn.functional.cross_entropy(answers, y)), rel=1e-12)
