"""``precision="auto"``: decided by the hardware and the model, the same at every start."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import difference, fit, images, mlp, rows, same, vectors

from manyhands import machine
from manyhands.book.torch import MODELS
from manyhands.training.options import Settings, Step
from manyhands.training.torch.data.sources import source
from manyhands.training.torch.job import Job
from manyhands.training.torch.learner import Rank
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.preflight import lessons, precision
from manyhands.training.torch.ranks.world import World

AMX = ("amx_bf16", "avx512f")


def convolving(channels: int = 64) -> nn.Sequential:
    torch.manual_seed(5)
    widths = [nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3), nn.Flatten()]
    return nn.Sequential(*widths, nn.Linear(4 * channels, channels), nn.ReLU(), nn.Linear(channels, 3))


def layers(*channels: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(channels)))


# Which layers there are alone decides


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (MODELS["resnet18"](num_classes=10), "bf16"),
        (MODELS["lenet"](num_classes=10), "fp32"),
        (MODELS["mlp"](num_classes=10), "fp32"),
        (layers(64, 64, 64, 10), "bf16"),
        (layers(64, 64, 10), "fp32"),
        (layers(63, 64, 63, 64), "fp32"),
        (nn.Conv2d(64, 64, 3, groups=64), "fp32"),
        (nn.TransformerEncoderLayer(128, 4), "bf16"),
        (nn.LSTM(128, 128), "fp32"),
        (layers(64, 64).double(), "float64"),
        (layers(64, 64).half(), "float16"),
    ],
)
def test_the_model_decides_where_the_cpu_has_amx(model: nn.Module, expected: str) -> None:
    assert precision.on_cpu(model, AMX).precision == expected
    assert not precision.on_cpu(model, ("avx512_bf16", "avx2")).bf16


def test_the_reason_is_given() -> None:
    assert str(precision.on_cpu(convolving(), AMX)) == (
        "precision fp32: the CPU has AMX, and 2 of 4 convolutions and linear layers have 64 channels or more"
    )
    assert str(precision.on_cpu(convolving(), ())) == "precision fp32: the CPU has no AMX"


# What a job makes of it


@pytest.fixture
def _amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_features", lambda: AMX)


def trained(**options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    X, y = images()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Flatten(), layers(36, 64, 64, 64, 3))
    return fit(net, (X.float(), y), **{"precision": "auto", **options})


@pytest.mark.usefixtures("_amx")
def test_the_choice_is_kept_in_the_run_and_by_a_resumed_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole, result = trained()
    assert not result.notes, "the weights' own precision is nothing to note"
    assert same(whole, trained(precision="fp32")[0])
    monkeypatch.setattr(precision, "_WIDE", 36)
    half, result = trained()
    assert same(half, trained(precision="bf16")[0])
    assert 0 < difference(half, whole) < 0.1

    trained(max_epochs=1, run=run)
    chosen = json.loads((run / "config.json").read_text())["chosen"]
    assert chosen["precision"] == "bf16"
    assert "3 of 4 convolutions and linear layers" in chosen["why"]
    monkeypatch.setattr(machine, "host_features", lambda: ())
    resumed, result = trained(run=run, resume="auto")
    assert same(half, resumed)
    assert "precision bf16: as in the checkpoint that this job continues" in result.notes
    assert json.loads((run / "config.json").read_text())["chosen"] == chosen, "the first reason stays"


@pytest.mark.parametrize("ranks", [1, 2])
def test_float64_is_given_again_where_a_job_is_resumed(ranks: int, tmp_path: Path) -> None:
    run, optimizer = tmp_path / "run", torch.optim.Adam
    trained(precision="fp64", optimizer=optimizer, max_epochs=1, run=run, ranks=ranks)
    _, result = trained(optimizer=optimizer, max_epochs=2, run=run, resume="auto", ranks=ranks)
    assert any("precision auto instead of fp64" in note for note in result.notes)


def test_what_the_user_gives_is_not_decided(tmp_path: Path) -> None:
    _, result = trained(precision="fp32", max_epochs=1, run=tmp_path / "run")
    assert not any("precision" in note for note in result.notes)
    assert "chosen" not in json.loads((tmp_path / "run" / "config.json").read_text())


def test_all_ranks_compute_alike() -> None:
    gpu, cpu = (
        precision.PrecisionChoice("bf16", "the GPU has bfloat16"),
        precision.PrecisionChoice("fp32", "the CPU has no AMX"),
    )
    assert precision.agree([gpu, gpu]) == gpu
    assert precision.agree([gpu, cpu]) == precision.agree([cpu, gpu]) == cpu


def test_ranks_in_processes_of_their_own_agree(tmp_path: Path) -> None:
    trained(ranks=2, max_epochs=1, run=tmp_path / "run")
    chosen = json.loads((tmp_path / "run" / "config.json").read_text())["chosen"]
    assert chosen["why"] == precision.on_cpu(layers(36, 64, 64, 64, 3), machine.host_features()).why


class Laid(torch.nn.Module):
    """Puts what a layer gives into a tensor of float32, which takes no other numbers."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net, self.fails = mlp(norm=True, dropout=0.5).float(), fails

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("always")
        scores = torch.zeros(len(X), 3)
        everywhere = torch.arange(len(X))
        scores[everywhere] = self.net(X)
        return scores


def rank_of(model: torch.nn.Module, **settings: Any) -> Rank:
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
    return Rank(job, World(0, 1, torch.device("cpu")))


@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize("options", [{}, {"step": Step(accumulate=2)}, {"step": Step(on_nan="continue")}])
def test_a_model_that_cannot_do_with_bfloat16_is_given_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The first step fails and is made again, with the statistics and random numbers that it began with."""
    monkeypatch.setattr(precision, "_WIDE", 1)
    X, y = vectors(48)
    data = (X.float(), y)
    expected, single = fit(Laid(), data, precision="fp32", **options)
    weights, result = fit(Laid(), data, precision="auto", run=tmp_path / "run", **options)
    assert same(expected, weights)
    assert rows(single) == rows(result)
    assert "precision fp32: the model cannot compute in bf16" in result.notes[0]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["chosen"]["precision"] == "fp32"
    with pytest.raises(ValueError, match="always"):
        fit(Laid(fails=True), data, precision="auto")


@pytest.mark.usefixtures("_amx")
def test_no_pass_is_made_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_WIDE", 1)
    calls = []
    model = mlp().float()
    model.register_forward_hook(lambda *_: calls.append(torch.is_autocast_enabled("cpu")))
    X, y = vectors(48)
    fit(model, (X.float(), y), precision="auto")
    assert calls == [True] * 6


@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize(
    ("model", "settings"), [(mlp().float(), {}), (Laid(fails=True), {}), (Laid(), {"precision": "bf16"})]
)
def test_all_others_compute_in_bfloat16(
    model: torch.nn.Module, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it can be computed with; where float32 would not do either; and where it was asked for."""
    monkeypatch.setattr(precision, "_WIDE", 1)
    rank = rank_of(model, **settings)
    rank.steps.precision.choose()
    assert rank.number_format.autocast is torch.bfloat16
    assert not [note for note in rank.notes if "cannot" in note]


def test_an_error_in_bfloat16_says_what_to_give() -> None:
    """With several ranks a first step cannot be made again."""
    X, y = vectors()
    model, data = Laid(), (X.float(), y)
    job = Job(model, objective_for(model, None), source(data), None, Settings(1, 8), torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as refused, torch.autocast("cpu", torch.bfloat16):
        model(data[0][:2])
    assert "give precision='fp32'" in str(lessons.of(job, refused.value))
    assert lessons.of(job, ValueError("of a callback")) is None
