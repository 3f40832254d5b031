"""bfloat16 on a CPU that is made for it: tried, and taken where it is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import convnet, difference, fit, images, same

from manyhands import machine
from manyhands.training.torch import precision
from manyhands.training.torch.job import Job


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
