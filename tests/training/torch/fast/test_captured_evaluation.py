"""Evaluation and prediction by replays: the same losses, metrics and outputs as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_cases import capturing, trained
from torch import nn
from training_cases import Rows, mlp, vectors

from manyhands.training.torch.trainer import Trainer


class Validated(nn.Module):
    """Steps of its own; ``reads``: the one that validates reads the number of the batch."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.net, self.reads = mlp(), reads

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.training_step(batch)
        return loss * (1 + batch_idx) if self.reads else loss


NETS = {
    "scores": lambda: mlp(norm=True),
    "a step of its own": lambda: Validated(reads=False),
    "a step that reads": lambda: Validated(reads=True),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("data", [vectors, Rows], ids=["arrays", "a data set"])
def test_the_same_evaluation(net: str, data: Any) -> None:
    train, test = vectors(32), data(150)
    _, expected = trained(NETS[net](), (train, test))
    with capturing() as captured:
        _, result = trained(NETS[net](), (train, test))
    assert captured.recorded > 2, "more than the steps"
    for row, other in zip(result.rows, expected.rows, strict=True):
        assert row["val_loss"] == pytest.approx(other["val_loss"], abs=1e-10)
        assert row["val_acc"] == other["val_acc"]


def test_metrics_and_predictions() -> None:
    def mean(outputs: Any, targets: Any) -> float:
        return float(outputs.mean()) + float(targets.sum())

    model, (X, y) = mlp(norm=True), vectors(4000)
    trainer = Trainer(1, batch_size=16, devices=["cpu"], precision="fp64", metrics={"mean": mean})
    measured, predicted = trainer.evaluate(model, (X, y)), trainer.predict(model, X)
    with capturing() as captured:
        assert trainer.evaluate(model, (X, y)) == pytest.approx(measured, abs=1e-10)
        assert torch.equal(trainer.predict(model, X), predicted)
    assert captured.replays > 10


class Numbered(torch.nn.Linear):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0].float()) + batch_idx


def test_a_predict_step_that_reads_the_number_of_its_batch() -> None:
    model, data, trainer = Numbered(6, 2), vectors(4000), Trainer(1, batch_size=16, devices=["cpu"])
    expected = trainer.predict(model, data)
    with capturing():
        assert torch.equal(trainer.predict(model, data), expected)
