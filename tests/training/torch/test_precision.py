"""bfloat16 on a CPU that is made for it: tried, and taken where it is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import convnet, difference, fit, images, mlp, same, vectors

from manyhands import machine
from manyhands.training.settings import Settings
from manyhands.training.torch import precision
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.rank import Rank
from manyhands.training.torch.sources import source
from manyhands.training.torch.step import Numbers
from manyhands.training.torch.world import World


@pytest.fixture
def _amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_features", lambda: ("amx_bf16",))


def trained(**options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    X, y = images()
    return fit(convnet().float(), (X.float(), y), **{"precision": "auto", **options})


def as_fast(monkeypatch: pytest.MonkeyPatch, single: float, half: float) -> None:
    def tried(job: Job, *_: object) -> tuple[float, float]:
        return single, half

    monkeypatch.setattr(precision, "tried", tried)


@pytest.mark.usefixtures("_amx")
def test_both_are_tried() -> None:
    net = convnet().float()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    X, y = images()
    _, result = fit(net, (X.float(), y), precision="auto", lr=0.0, max_epochs=1)
    (note,) = [note for note in result.notes if "AMX" in note]
    assert note.startswith(("bf16: a pass takes", "fp32: a pass takes"))
    assert all(torch.equal(before[n], v) for n, v in net.state_dict().items() if n.endswith(("weight", "bias")))
    assert int(net[1].num_batches_tracked) == 4  # the passes that were only tried do not count


@pytest.mark.usefixtures("_amx")
def test_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_fast(monkeypatch, single=1.0, half=2.0)
    assert same(trained()[0], trained(precision="fp32")[0])
    as_fast(monkeypatch, single=2.0, half=1.0)
    half, result = trained()
    assert any(note.startswith("bf16: a pass takes 1e+03 ms, in fp32 2e+03 ms") for note in result.notes)
    assert same(half, trained(precision="bf16")[0])
    assert 0 < difference(half, trained(precision="fp32")[0]) < 0.1

    trained(max_epochs=1, run=tmp_path / "run")
    as_fast(monkeypatch, single=1.0, half=2.0)
    assert same(half, trained(run=tmp_path / "run", resume="auto")[0])


def test_nothing_is_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_features", lambda: ("asimd",))
    assert not any("AMX" in note for note in trained()[1].notes)


class Laid(torch.nn.Module):
    """Puts what a layer gives into a tensor of float32, which takes no other numbers."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net, self.fails = mlp().float(), fails

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("always")
        scores = torch.zeros(len(X), 3)
        rows = torch.arange(len(X))
        scores[rows] = self.net(X)
        return scores


def rank_of(model: torch.nn.Module, **settings: Any) -> Rank:
    """A rank that has chosen bfloat16, as one on a GPU does."""
    X, y = vectors()
    settings = {"max_epochs": 1, "batch_size": 8, **settings}
    job = Job(
        model,
        objective_for(model, None),
        source((X.float(), y)),
        None,
        Settings(**settings),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    rank = Rank(job, World(0, 1, torch.device("cpu")))
    rank.numbers.autocast = torch.bfloat16
    return rank


def test_a_model_that_cannot_do_with_bfloat16_is_given_float32() -> None:
    rank = rank_of(Laid())
    drawn = torch.get_rng_state()
    rank._choose_precision()
    assert rank.plain_step.numbers == Numbers()
    assert "the model cannot compute in bf16" in rank.notes[0]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in rank.model.parameters())


@pytest.mark.parametrize(
    ("model", "settings"), [(mlp().float(), {}), (Laid(fails=True), {}), (Laid(), {"precision": "bf16"})]
)
def test_all_others_keep_bfloat16(model: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Where it can be computed with; where float32 would not do either; and where it was asked for."""
    rank = rank_of(model, **settings)
    rank._choose_precision()
    assert rank.numbers.autocast is torch.bfloat16
    assert not [note for note in rank.notes if "cannot" in note]
