"""A job that is long enough to win back the compiler's time compiles its step by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from manyhands import torch as mh  # noqa: E402
from manyhands.training.torch.fast import build, compile_gain  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("pays", [False, True])
def test_a_job_decides_itself(pays: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_LEAST_STEPS_TO_COMPILE", 0)
    if pays:
        monkeypatch.setattr(compile_gain, "_SECONDS", 0.0)
        monkeypatch.setattr(compile_gain, "_SECONDS_PER_OPERATION", 0.0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10))
    data = torch.rand(2048, 64), torch.arange(2048) % 10
    result = mh.Trainer(3, 1, devices="gpu", batch_size=128, lr=0.05, run=tmp_path / "run", quiet=True).fit(net, data)
    told = (tmp_path / "run" / "step.txt").read_text()
    print(told)
    assert ("it pays off" in told) == ("kernels compiled" in told) == pays
    assert result.rows[-1]["train_loss"] < result.rows[0]["train_loss"]


def test_the_memory_of_a_gpu_has_a_speed() -> None:
    speed = compile_gain._memory_speed(torch.device("cuda", 0))
    assert speed != compile_gain._BYTES_PER_SECOND
    assert 1e11 < speed < 1e14
