"""Means that divide by what the labels weigh: class weights and labels that are left out, exact in parts of a batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from training_cases import CLASSES, Rows, convnet, difference, fit, images, mlp, vectors

from manyhands.errors import BadSettings

WEIGHT = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def log_scores() -> nn.Module:
    return nn.Sequential(mlp(), nn.LogSoftmax(1))


LOSSES: dict[str, tuple[Any, Any]] = {
    "weights": (mlp, nn.CrossEntropyLoss(weight=WEIGHT)),
    "left out": (mlp, nn.CrossEntropyLoss(ignore_index=1)),
    "both, smoothed": (mlp, nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=0, label_smoothing=0.1)),
    "likelihood": (log_scores, nn.NLLLoss(weight=WEIGHT, ignore_index=1)),
    "a function": (mlp, functools.partial(functional.cross_entropy, weight=WEIGHT)),
}


def close(make: Any, data: Any, **options: Any) -> None:
    """The same on one rank, in parts on one rank, and on two ranks with uneven shares."""
    alone, expected = fit(make(), data, **options)
    for ranks, more in ((1, {"accumulate": 3}), (2, {"shares": [0.8, 0.2]})):
        weights, result = fit(make(), data, ranks, **options, **more)
        assert difference(alone, weights) < 1e-12
        for one, other in zip(expected.rows, result.rows, strict=True):
            assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)
            assert one["train_acc"] == other["train_acc"]
            assert one["test_loss"] is None or one["test_loss"] == pytest.approx(other["test_loss"], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_exact_in_parts(name: str) -> None:
    make, loss = LOSSES[name]
    close(make, (vectors(), vectors(37)), loss=loss, gradient_clip_val=0.5)


def test_the_loss_over_a_test_set_is_divided_once() -> None:
    net, (X, y) = mlp(), vectors(37)
    _, result = fit(net, (vectors(), (X, y)), 2, loss=nn.CrossEntropyLoss(weight=WEIGHT), batch_size=8, max_epochs=1)
    expected = functional.cross_entropy(net(X), y, weight=WEIGHT).detach()
    assert result.rows[-1]["test_loss"] == pytest.approx(float(expected), rel=1e-12)


def test_weights_follow_the_model() -> None:
    """The caller's loss is as it was, and the job's own has the dtype that the model was given."""
    loss = nn.CrossEntropyLoss(weight=WEIGHT.float())
    for ranks in (1, 2):
        fit(mlp(), vectors(), ranks, loss=loss, max_epochs=1)
        fit(mlp(), vectors(), ranks, loss=functools.partial(functional.cross_entropy, weight=loss.weight), max_epochs=1)
    assert loss.weight is not None
    assert loss.weight.dtype == torch.float32


def marked(count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    X, y = vectors(count)
    y[::3] = -100
    y[:4] = -100  # a whole shard without a label that counts
    return X, y


def test_the_usual_loss_leaves_out_what_is_marked() -> None:
    X, y = marked()
    close(mlp, DataLoader(TensorDataset(X, y), batch_size=16))
    close(mlp, DataLoader(TensorDataset(X, y), batch_size=16, drop_last=True))
    close(mlp, TensorDataset(X, y))


def test_labels_per_pixel() -> None:
    X, _ = images(40)
    y = torch.randint(CLASSES, (40, 6, 6), generator=torch.Generator().manual_seed(3))
    y[:, 2:4] = 255
    y[5] = 255

    def pixels() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(1, CLASSES, 3, padding=1).double()

    close(pixels, (X, y), loss=nn.CrossEntropyLoss(ignore_index=255))


def test_probabilities() -> None:
    X, y = vectors()
    likely = functional.one_hot(y, CLASSES).double() * 0.7 + 0.1
    close(mlp, (X, likely), loss=nn.CrossEntropyLoss(weight=WEIGHT))


def test_statistics_over_the_whole_batch() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    alone, _ = fit(convnet(), images(), loss=loss, batch_stats="global")
    both, _ = fit(convnet(), images(), 2, loss=loss, batch_stats="global", shares=[1, 0])
    assert difference(alone, both) < 1e-12


class Own(nn.CrossEntropyLoss):
    """What it divides by is its own business."""

    def forward(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(scores * 2, y)


def test_a_class_of_ones_own_is_refused() -> None:
    with pytest.raises(BadSettings, match="the loss Own has weights of classes"):
        fit(mlp(), Rows(), 2, loss=Own(weight=WEIGHT))
