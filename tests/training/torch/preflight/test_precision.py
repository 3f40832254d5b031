"""``precision="auto"``: decided by the hardware and the model, the same at every start."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import difference, fit, images, mlp, same, vectors

from manyhands import machine
from manyhands.book.torch import MODELS
from manyhands.errors import BadBatch
from manyhands.training.options import Settings
from manyhands.training.torch.preflight import precision

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
    assert precision.on_cpu(model, AMX)[0] == expected
    assert precision.on_cpu(model, ("avx512_bf16", "avx2"))[0] != "bf16"


def test_the_reason_is_given() -> None:
    assert precision.on_cpu(convolving(), AMX) == (
        "fp32",
        "the CPU has AMX, and 2 of 4 convolutions and linear layers have 64 channels or more",
    )
    assert precision.on_cpu(convolving(), ()) == ("fp32", "the CPU has no AMX")


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
    given, result = trained(precision="fp32")
    assert same(whole, given)
    assert not any("precision" in note for note in result.notes), "what the user gives is not decided"
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


@pytest.mark.usefixtures("_amx")
def test_all_ranks_compute_alike() -> None:
    """One without bfloat16 is enough."""

    other = ("fp32", "the CPU has no AMX")
    job: Any = SimpleNamespace(settings=Settings())
    world: Any = SimpleNamespace(device=torch.device("cpu"), values=lambda own: [own, other, own])
    assert precision.choose(job, layers(64, 64), world, None) == other


def test_ranks_in_processes_of_their_own_agree(tmp_path: Path) -> None:
    trained(ranks=2, max_epochs=1, run=tmp_path / "run")
    chosen = json.loads((tmp_path / "run" / "config.json").read_text())["chosen"]
    assert chosen["why"] == precision.on_cpu(layers(36, 64, 64, 64, 3), machine.host_features())[1]


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
def test_an_error_in_bfloat16_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 would not do either, it does not."""
    monkeypatch.setattr(precision, "_WIDE", 1)
    X, y = vectors(48)
    with pytest.raises(BadBatch, match="give precision='fp32'"):
        fit(Laid(), (X.float(), y), precision="auto")
    fit(Laid(), (X.float(), y), precision="fp32")
    with pytest.raises(ValueError, match="always"):
        fit(Laid(fails=True), (X.float(), y), precision="auto")
