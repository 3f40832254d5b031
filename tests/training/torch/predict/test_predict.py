"""What a prediction is measured from: a real step of one device, on the CPU."""

from __future__ import annotations

import copy
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import machine
from manyhands import torch as mh
from manyhands.cli import main
from manyhands.errors import BadBatch, BadProfile, BadSettings
from manyhands.predict import profile as neutral
from manyhands.predict.memory_lines import History, memory_lines
from manyhands.predict.profile import Profile
from manyhands.training.settings import Settings
from manyhands.training.torch.predict import measure, measured_link, real_steps
from manyhands.training.torch.predict.memory_count import MemoryCount
from manyhands.training.torch.ranks import gradient_sum

FP32 = Settings(precision="fp32")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LONG_ENOUGH", 0.05)
    monkeypatch.setattr(real_steps, "_LONG_ENOUGH", 0.05)
    monkeypatch.setattr(real_steps, "MOST", 1)
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)  # as many threads for a part as for the whole


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 10))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 100), torch.randint(10, (size,))


def test_bytes_count_from_birth_to_death() -> None:
    with MemoryCount(torch.device("cpu")) as count:
        kept = torch.ones(1000)
        gone = kept + 1
        view = gone[:10]
        del gone
        later = torch.ones(500)
        del view
        torch.ones(10)
        count.hold("weights", [kept, kept[5:]])
        del later
    (line,) = memory_lines(False, count.history(1))
    assert (line.fixed.weights, line.fixed.activations) == (4000, 6000)


class Scripted:
    """An allocator whose peak during each operation is written down."""

    def __init__(self, peaks: list[int]) -> None:
        self._peaks = peaks

    def held(self) -> int:
        return 0

    def reset(self) -> None:
        pass

    def peak(self) -> int:
        return self._peaks.pop(0)


def step_with_workspace(batch: int) -> History:
    """Something small that needs much workspace, and a result that is larger and needs none; for 8 samples both peaks
    are about the same, for more of them the second one counts."""
    peaks = [4 * batch, 40_000 + 4 * batch, 4 * batch, 8000 * batch]
    with MemoryCount(torch.device("cpu"), Scripted(peaks)) as count:
        x = torch.ones(batch)
        y = x * 2  # beside its result 40,000 bytes of workspace
        z = y * 2
        kept = torch.ones(2000 * batch)
        del x, y, z, kept
    return count.history(batch)


def test_workspace_counts_at_the_moment_of_its_operation() -> None:
    lines = memory_lines(False, step_with_workspace(4), step_with_workspace(8))
    for batch_size, workspace, peak in ((1, 40_000, 40_008), (4, 40_000, 40_032), (128, 0, 128 * 8012)):
        memory = max((line.at(batch_size) for line in lines), key=lambda memory: memory.peak)
        assert (memory.workspace, memory.peak) == (workspace, peak)


def test_a_profile_counts_every_byte() -> None:
    model, size = net(), 64
    made = measure.profile(
        model,
        batch(size),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        settings=FP32,
        device=torch.device("cpu"),
    )
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    for devices, batch_size in ((1, 64), (1, 32), (2, 32), (2, 16), (1, 1000), (2, 1 << 20)):
        memory = made.memory_of(batch_size, devices)
        assert memory is not None
        assert (memory.weights, memory.optimizer) == (weights, weights)
        assert memory.batch == pytest.approx(batch_size * (100 * 4 + 8))
        # Kept for the backward pass: both results of ReLU, and the log-probabilities; in it, gradients of them.
        kept = 4 * batch_size * (200 + 300 + 10)
        assert memory.peak >= 2 * weights + kept + memory.batch
        assert memory.peak <= 4 * weights + 3 * kept + memory.batch
        if devices == 2:
            assert (memory.gradients, memory.buckets) == (weights, 4 * 7)
    assert made.input_bytes == 408


@pytest.mark.parametrize("several", [1, 2])
def test_the_peak_of_a_large_batch_is_known_from_a_small_one(several: int) -> None:
    """The peak of the small one is in the optimizer, that of the large one in the backward pass."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(16 * 32, 10))
    small, large = (
        measure.profile(
            model,
            (torch.randn(size, 16, 8), torch.randint(10, (size,))),
            optimizer="adamw",
            settings=FP32,
            device=torch.device("cpu"),
        )
        for size in (4, 64)
    )
    predicted, counted = small.memory_of(64, several), large.memory_of(64, several)
    assert predicted is not None
    assert counted is not None
    assert predicted.peak == pytest.approx(counted.peak, rel=0.02)
    assert predicted.peak > 3 * small.memory_of(4, several).peak


def test_the_step_is_that_of_ranks() -> None:
    model = nn.Sequential(nn.Linear(1000, 600), nn.Linear(600, 600), nn.Linear(600, 10))
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = measure.profile(model, (torch.randn(8, 1000), torch.randint(10, (8,))), settings=FP32)
    assert [bucket.size for bucket in made.buckets] == [
        size for size, _ in gradient_sum.GradientSum(model.parameters()).contents()
    ]
    assert [bucket.ready for bucket in made.buckets] == sorted(bucket.ready for bucket in made.buckets)
    assert 0 < made.buckets[0].ready < made.buckets[-1].ready <= 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(seed, torch.get_rng_state())  # only by this test's own randn
    assert (neutral.FIRST_BUCKET, neutral.BUCKET) == (gradient_sum._FIRST_BUCKET, gradient_sum._BUCKET)


def test_predict_gives_times_and_memory(tmp_path: Path) -> None:
    model = net()
    state = torch.get_rng_state()
    inputs = batch(64)
    torch.set_rng_state(state)
    made = mh.predict(model, inputs, devices=[1, 2, 64], link="nvlink", precision="fp32", device="cpu")
    assert torch.equal(state, torch.get_rng_state())
    one, two, many = made.rows
    assert one.seconds == pytest.approx(made.profile.times[0].total)
    assert (two.shard, many.shard) == (32, 1)
    assert all(row.memory is not None and row.memory.peak > 0 and row.fits for row in made.rows)
    assert Profile.load(made.profile.save(tmp_path / "profile.json")) == made.profile
    assert "peak memory" in str(made)


def test_ranks_at_once_are_timed_as_a_job_makes_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = net(), batch(16)
    monkeypatch.setattr(real_steps, "MOST", 2)
    made = mh.predict(model, inputs, devices=[1, 2, 8], link="pcie", precision="fp32", device="cpu")
    (contention,) = made.profile.contentions
    assert (contention.devices, made.profile.notes) == (2, ())
    assert contention.slowdown > 0
    assert contention.straggling >= 0
    one, two, _ = made.rows
    step = made.profile.step(8, 2).total
    assert two.terms["computing"] + two.terms["fixed cost"] == pytest.approx(step)
    assert two.terms["contention"] + two.terms["stragglers"] >= step * (
        contention.slowdown * (1 + contention.straggling) - 1
    )
    assert one.seconds == pytest.approx(made.profile.step(16, 1).total)


def test_a_model_that_cannot_be_sent_is_predicted_without_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Locked:
            return Locked(100, 10)

        def __reduce__(self) -> Any:
            raise TypeError("it has a lock")

    monkeypatch.setattr(real_steps, "MOST", 2)
    made = mh.predict(Locked(100, 10), batch(16), devices=[1, 2], precision="fp32", device="cpu")
    assert made.profile.contentions == ()
    assert "estimated, not measured: the model of this job cannot be sent" in made.profile.notes[-1]
    assert made.rows[1].seconds > 0


@pytest.mark.parametrize(
    "inputs",
    [
        {"input": torch.randn(6, 100), "labels": torch.randint(10, (6,))},
        ((torch.randn(6, 100), torch.randn(6, 3)), torch.randint(10, (6,))),
    ],
)
def test_steps_of_a_job_take_any_batch(inputs: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 10)

        def training_step(self, batch: Any) -> torch.Tensor:
            leaf = batch["input"] if isinstance(batch, dict) else batch[0][0]
            assert leaf.shape[1:] == (100,)
            return self.layer(leaf).square().mean()

    made = mh.predict(Own(), inputs, devices=[1], precision="fp32", device="cpu")
    assert made.rows[0].seconds > 0


def test_one_sample_and_a_step_of_its_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 10)

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.layer(batch["x"]).square().mean()

    made = mh.predict(Own(), {"x": torch.randn(1, 100)}, devices=[1, 2], precision="fp32", device="cpu")
    assert made.profile.batch_size == 1
    assert made.rows[1].seconds > 0


def test_what_cannot_be_predicted_is_one_line() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (net(), (torch.randn(4, 3), torch.zeros(4).long()), "the model cannot be run on this batch: RuntimeError"),
        (nn.Linear, batch(4), "the class Linear cannot be trained"),
        (nn.ReLU(), batch(4), "has no parameters that could be trained"),
    ]
    for model, inputs, words in refused:
        with pytest.raises(BadSettings, match=words) as caught:
            mh.predict(model, inputs, devices=[1, 2], device="cpu")
        assert "\n" not in str(caught.value)
    with pytest.raises(BadBatch, match="no tensor with samples"):
        mh.predict(net(), "batch", devices=[1], device="cpu")
    with pytest.raises(BadBatch, match="inputs, target"):
        mh.predict(net(), (torch.randn(4, 100),), devices=[1], device="cpu")
    with pytest.raises(BadSettings, match="link 'wire' is not known"):
        mh.predict(net(), batch(4), link="wire")
    with pytest.raises(BadSettings, match="precision='half'"):
        mh.predict(net(), batch(4), precision="half")


def test_what_cannot_be_right_is_measured_again_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1 if len(x) == 64 and len(measured) <= disturbances else 0.02)
            return super().forward(x)

    def profile(*args: Any, **options: Any) -> Profile:
        measured.append(None)
        return real(*args, **options)

    real, measured = measure.profile, []
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(measure, "profile", profile)
    disturbances = 1
    made = mh.predict(Disturbed(100, 10), batch(64), devices=[1, 2], link="nvlink", precision="fp32", device="cpu")
    assert len(measured) == 2
    assert made.rows[1].efficiency <= 1.1
    measured.clear()
    disturbances = 9
    with pytest.raises(BadProfile, match=r"2 devices would be \d+% efficient"):
        mh.predict(Disturbed(100, 10), batch(64), devices=[1, 2], link="nvlink", precision="fp32", device="cpu")
    assert len(measured) == 2


def test_a_link_between_two_ranks_is_measured() -> None:
    link = measured_link.measure("cpu", 2)
    assert link.bandwidth(2) > 1e6
    assert link.hop is not None
    assert 0 < link.hop < 1


SCRIPT = """
import torch
def make():
    return torch.nn.Linear(100, 10), (torch.randn(16, 100), torch.randint(10, (16,)))
def wrong():
    return 3
def raising():
    raise OSError("the data are gone")
def broken():
    return torch.nn.Linear(99, 10), (torch.randn(16, 100), torch.randint(10, (16,)))
def short():
    return (torch.nn.Linear(2, 2),)

def needs(size, seed=0):
    return 3
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "s.py").write_text(SCRIPT)
    script, stored, plot = (str(tmp_path / name) for name in ("s.py", "p.json", "p.png"))
    common = ["--precision", "fp32", "--devices", "1,2,8", "--batch-size", "24"]
    assert main(["predict", f"{script}:make", *common, "--save-profile", stored, "--json", "--plot", plot]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [row["batch_size_per_device"] for row in output["rows"]] == [24, 12, 3]
    assert output["model"] == f"{script}:make"
    assert Path(plot).read_bytes().startswith(b"\x89PNG")
    assert main(["predict", "--profile", stored, "--link", "ethernet-100g", "--devices", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "device" in shown.splitlines()[0]
    node = tmp_path / "node.json"
    node.write_text('{"schema": 1, "seconds": 0.104, "gradient_bytes": 102e6, "batch_size": 256, "devices": 8}')
    assert main(["predict", "--profile", str(node), "--link", "nvlink-v100", "--input-rate", "2500", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["devices"] for row in rows] == [8, 16, 32, 64, 128, 512, 8192]
    for arguments, words in (
        ([f"{script}:wrong"], "returns one value of type int: let it return (model, (X, y))"),
        ([f"{script}:short"], "returns a tuple of length 1: let it return (model, (X, y))"),
        ([f"{script}:needs"], "needs arguments (size): let it take none and return (model, (X, y))"),
        ([f"{script}:raising"], f"{script}:raising raised OSError: the data are gone (line 8)"),
        ([f"{script}:broken"], "the model cannot be run on this batch"),
        ([f"{script}:make", "--model", "mlp"], "give one of them"),
        (["--profile", script], "is not a profile of manyhands: no JSON"),
        (["--profile", stored, "--model", "mlp"], "a profile has its own model"),
        (["--link", "wire"], "is not known"),
        (["--plot", str(tmp_path / "none" / "p.png")], "there is no folder"),
        (["--save-profile", str(tmp_path / "none" / "p.json")], "there is no folder"),
        (["--save-profile", str(tmp_path)], "it is a folder"),
    ):
        assert main(["predict", *arguments]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    script = tmp_path / "script.py"
    script.write_text("def make(): raise AssertionError('called')")
    assert main(["predict", f"{script}:make", "--plot", str(tmp_path / "p.svg")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        shown.err == "manyhands: the plot cannot be drawn: matplotlib is not installed. Run: pip install matplotlib\n"
    )


def test_the_examples_of_the_page_run() -> None:
    page = (Path(__file__).parents[4] / "docs" / "predict.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(example, {})
