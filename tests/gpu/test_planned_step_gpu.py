"""The trainer's step as a plan of the whole, on a real GPU: the same bits, whoever makes a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.training.options import Step  # noqa: E402
from manyhands.training.torch.book import models  # noqa: E402

COUNT = 64 * 90 + 20  # the last batch of an epoch is short
IMAGES = torch.rand(COUNT, 1, 28, 28, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(10, (COUNT,), generator=torch.Generator().manual_seed(1))


class Towers(nn.Module):
    """Many small operations side by side: there a plan is clearly faster."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
            for _ in range(8)
        )

    def forward(self, x: Any) -> Any:
        return torch.stack([tower(x) for tower in self.towers]).mean(0)


def trained(epochs: int = 2, **options: Any) -> tuple[dict[str, Any], mh.Result]:
    torch.manual_seed(0)
    net = Towers()
    settings: Any = {"devices": ["gpu:0"], "batch_size": 64, "lr": 0.01, "quiet": True, **options}
    result = mh.Trainer(epochs, **settings).fit(net, ((IMAGES, LABELS), (IMAGES[:100], LABELS[:100])))
    return net.state_dict(), result


def assert_same(one: tuple[dict[str, Any], mh.Result], other: tuple[dict[str, Any], mh.Result]) -> None:
    for name, value in other[0].items():
        assert torch.equal(one[0][name], value), name
    for row, expected in zip(one[1].rows, other[1].rows, strict=True):
        assert (row["train_loss"], row["val_acc"]) == (expected["train_loss"], expected["val_acc"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1, "schedule": mh.one_cycle},
        {"optimizer": torch.optim.AdamW, "lr": 1e-3, "precision": "fp32"},
        {"callbacks": [mh.EMA(0.9)]},
    ],
    ids=["sgd", "clip and schedule", "adamw", "with an average"],
)
def test_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    planned = trained(step=Step(parallel=True), run=tmp_path / "run", **options)
    assert any("the whole step is planned" in note for note in planned[1].notes), planned[1].notes
    told = (tmp_path / "run" / "step.txt").read_text()
    assert "lanes, one graph, equal to the bit" in told
    assert_same(planned, trained(step=Step(parallel=False), **options))


def test_a_job_goes_on_with_or_without_a_plan(tmp_path: Path) -> None:
    whole = trained(2, step=Step(parallel=False))
    trained(1, step=Step(parallel=True), run=tmp_path / "run")
    resumed = trained(2, step=Step(parallel=False), run=tmp_path / "run", resume="auto")
    for name, value in whole[0].items():
        assert torch.equal(resumed[0][name], value), name


def test_a_planned_step_has_the_convolutions_of_pytorch(tmp_path: Path) -> None:
    def trained(step: Step) -> tuple[dict[str, Any], mh.Result]:
        net = models.initialise(models.lenet(), seed=0)
        how: Any = {"devices": ["gpu:0"], "batch_size": 64, "lr": 0.01, "precision": "bf16", "quiet": True}
        return net.state_dict(), mh.Trainer(2, **how, step=step).fit(net, (IMAGES, LABELS))

    (planned, _), (captured, _) = trained(Step(parallel=True)), trained(Step(tuned_convolutions=False))
    for name, value in captured.items():
        assert torch.equal(planned[name], value), name


def test_a_step_with_our_norms_is_not_planned(tmp_path: Path) -> None:
    net = models.initialise(models.small_resnet(), seed=0)
    how: Any = {"devices": ["gpu:0"], "batch_size": 64, "lr": 0.01, "quiet": True, "run": tmp_path / "run"}
    result = mh.Trainer(2, **how, step=Step(parallel=True)).fit(net, (IMAGES, LABELS))
    assert any("not planned: our kernels for normalisation" in note for note in result.notes), result.notes
    assert "not planned" in (tmp_path / "run" / "step.txt").read_text()
