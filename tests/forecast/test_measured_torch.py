"""What a forecast is measured from: a real step of one device, on the CPU."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import machine
from manyhands import torch as mh
from manyhands.cli import main
from manyhands.errors import BadBatch, BadSettings
from manyhands.forecast import profile as neutral
from manyhands.forecast import torch as measured
from manyhands.forecast.profile import Profile
from manyhands.training.options import Settings
from manyhands.training.torch.ranks import gradient_sum

FP32 = Settings(precision="fp32")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_LONG_ENOUGH", 0.05)


def profile_of(model: nn.Module, batch: Any, optimizer: Any = None) -> Profile:
    return measured.profile(model, batch, loss=None, optimizer=optimizer, settings=FP32, device="cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 10))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 100), torch.randint(10, (size,))


def test_a_profile_counts_every_byte() -> None:
    model, size = net(), 64
    made = profile_of(model, batch(size), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    for devices, batch_size in ((1, 64), (1, 32), (2, 32), (2, 16), (1, 1000), (2, 1 << 20)):
        memory = made.memory_of(batch_size, devices)
        assert (memory.weights, memory.optimizer) == (weights, weights)
        assert memory.batch == pytest.approx(batch_size * (100 * 4 + 8))
        # Kept for the backward pass: both results of ReLU, and the log-probabilities; in it, gradients of them.
        kept = 4 * batch_size * (200 + 300 + 10)
        assert memory.total >= 2 * weights + kept + memory.batch
        assert memory.total <= 4 * weights + 3 * kept + memory.batch
        if devices == 2:
            assert memory.gradients == weights + 4 * 7
    assert made.input_bytes == 408


@pytest.mark.parametrize("several", [1, 2])
def test_the_peak_of_a_large_batch_is_known_from_a_small_one(several: int) -> None:
    """The peak of the small one is in the optimizer, that of the large one in the backward pass."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(16 * 32, 10))
    small, large = (
        profile_of(model, (torch.randn(size, 16, 8), torch.randint(10, (size,))), "adamw") for size in (4, 64)
    )
    foreseen, counted = small.memory_of(64, several), large.memory_of(64, several)
    assert foreseen.total == pytest.approx(counted.total, rel=0.02)
    assert foreseen.total > 3 * small.memory_of(4, several).total


def test_the_step_is_that_of_ranks() -> None:
    model = nn.Sequential(nn.Linear(1000, 600), nn.Linear(600, 600), nn.Linear(600, 10))
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = profile_of(model, (torch.randn(8, 1000), torch.randint(10, (8,))))
    assert [bucket.size for bucket in made.buckets] == [
        size for size, _ in gradient_sum.GradientSum(model.parameters()).contents()
    ]
    assert [bucket.ready for bucket in made.buckets] == sorted(bucket.ready for bucket in made.buckets)
    assert 0 < made.buckets[0].ready < made.buckets[-1].ready <= 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(seed, torch.get_rng_state())  # only by this test's own randn
    assert (neutral.FIRST_BUCKET, neutral.BUCKET) == (gradient_sum._FIRST_BUCKET, gradient_sum._BUCKET)


def test_forecast_gives_times_and_memory(tmp_path: Path) -> None:
    model = net()
    state = torch.get_rng_state()
    inputs = batch(64)
    torch.set_rng_state(state)
    made = mh.forecast(model, inputs, devices=[1, 2, 64], link="nvlink", precision="fp32", device="cpu")
    assert torch.equal(state, torch.get_rng_state())
    one, two, many = made.rows
    assert one.seconds == pytest.approx(made.profile.times[0].total)
    assert (two.shard, many.shard) == (32, 1)
    assert all(row.memory is not None and row.memory.total > 0 and row.fits for row in made.rows)
    assert Profile.load(made.profile.save(tmp_path / "profile.json")) == made.profile
    assert "peak memory" in str(made)


@pytest.mark.parametrize(
    "inputs",
    [
        {"input": torch.randn(6, 100), "labels": torch.randint(10, (6,))},
        ((torch.randn(6, 100), torch.randn(6, 3)), torch.randint(10, (6,))),
        {"input": torch.randn(1, 100)},
    ],
)
def test_a_step_takes_any_batch(inputs: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            leaf = batch["input"] if isinstance(batch, dict) else batch[0][0]
            assert leaf.shape[1:] == (100,)
            self.log("mean", leaf.mean())  # type: ignore[operator]
            return self.layer(leaf).square().mean()

    made = mh.forecast(Own(), inputs, devices=[1], precision="fp32", device="cpu")
    assert made.rows[0].seconds > 0


def test_what_cannot_be_measured_is_one_line() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (net(), (torch.randn(4, 3), torch.zeros(4).long()), "the model cannot be run on this batch: RuntimeError"),
        (nn.Linear, batch(4), "the class Linear cannot be trained"),
        (nn.ReLU(), batch(4), "has no parameters that could be trained"),
    ]
    for model, inputs, words in refused:
        with pytest.raises(BadSettings, match=words) as caught:
            mh.forecast(model, inputs, devices=[1, 2], device="cpu")
        assert "\n" not in str(caught.value)
    for unread, words in (("batch", "no tensor with samples"), ((torch.randn(4, 100),), "inputs, target")):
        with pytest.raises(BadBatch, match=words):
            mh.forecast(net(), unread, devices=[1], device="cpu")
    for option, words in (({"link": "wire"}, "link 'wire' is not known"), ({"precision": "half"}, "precision='half'")):
        with pytest.raises(BadSettings, match=words):
            mh.forecast(net(), batch(4), **option)


SCRIPT = """
import torch
def make():
    return torch.nn.Linear(100, 10), (torch.randn(16, 100), torch.randint(10, (16,)))
def wrong():
    return 3
def broken():
    return torch.nn.Linear(99, 10), (torch.randn(16, 100), torch.randint(10, (16,)))
def other():
    return 3, (1, 2)
def short():
    return (torch.nn.Linear(2, 2),)

"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "check_load", lambda: None)
    (tmp_path / "s.py").write_text(SCRIPT)
    script, stored, plot = (str(tmp_path / name) for name in ("s.py", "p.json", "p.png"))
    common = ["--precision", "fp32", "--devices", "1,2,8", "--batch-size", "24"]
    assert main(["forecast", f"{script}:make", *common, "--save-profile", stored, "--json", "--plot", plot]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [row["batch_size_per_device"] for row in output["rows"]] == [24, 12, 3]
    assert output["model"] == f"{script}:make"
    assert Path(plot).read_bytes().startswith(b"\x89PNG")
    assert main(["forecast", "--profile", stored, "--link", "ethernet-100g", "--devices", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "device" in shown.splitlines()[0]
    node = tmp_path / "node.json"
    node.write_text('{"schema": 1, "seconds": 0.104, "gradient_bytes": 102e6, "batch_size": 256, "devices": 8}')
    assert main(["forecast", "--profile", str(node), "--link", "nvlink-v100", "--input-rate", "2500", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["devices"] for row in rows] == [8, 16, 32, 64, 128, 512, 8192]
    for arguments, words in (
        ([f"{script}:wrong"], "returns an int: let it return (model, (X, y))"),
        ([f"{script}:short"], "returns a tuple: let it return (model, (X, y))"),
        ([f"{script}:broken"], "the model cannot be run on this batch"),
        ([f"{script}:make", "--model", "mlp"], "give one of them"),
        (["--profile", script], "is not a profile of manyhands: no JSON"),
        (["--profile", stored, "--model", "mlp"], "a profile has its own model, precision"),
        (["--link", "wire"], "is not known"),
        ([f"{script}:other"], "a model of type int: forecast measures models of PyTorch and JAX"),
        (["--plot", str(tmp_path / "none" / "p.png")], "there is no folder"),
        (["--save-profile", str(tmp_path / "none" / "p.json")], "there is no folder"),
        (["--save-profile", str(tmp_path)], "it is a folder"),
    ):
        assert main(["forecast", *arguments]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_a_loaded_machine_gives_no_forecast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 80.0)
    assert main(["forecast", "--model", "mlp", "--framework", "torch"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "not measured: the machine is busy: other programs use 80% of the CPU" in shown.err


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    script = tmp_path / "script.py"
    script.write_text("def make(): raise AssertionError('called')")
    assert main(["forecast", f"{script}:make", "--plot", str(tmp_path / "p.svg")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        shown.err == "manyhands: the plot cannot be drawn: matplotlib is not installed. Run: pip install matplotlib\n"
    )
