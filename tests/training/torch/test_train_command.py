"""``manyhands train`` and ``manyhands parity``, as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import manyhands.training
from manyhands.cli import main
from manyhands.training.checkpoints import store

SMALL = str(Path(manyhands.training.__file__).parent / "data" / "fashion-mnist-small")


def test_a_resumed_run_is_the_job_that_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would make it another job is refused in the words of the command, and changes nothing."""
    run = tmp_path / "run"
    options = ["--model", "mlp", "--epochs", "1", "--devices", "cpu", "--data", SMALL, "--precision", "fp32"]
    assert main(["train", *options, "--run", str(run), "--quiet"]) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    refused = [
        (["--resume", str(run), "--seed", "9"], "a job with --seed 0, this one has --seed 9"),
        (["--resume", str(run), "--batch-size", "64"], "a job with --batch-size 128, this one has --batch-size 64"),
        (["--resume", str(run), "--model", "lenet"], "was started with --model mlp"),
        (["--resume", str(run), "--framework", "jax"], "manyhands convert makes a run for another"),
        (["--resume", str(run), "--run", str(tmp_path)], "a run continues in its own folder"),
    ]
    for given, words in refused:
        assert main(["train", *given]) == 1
        assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main(["train", "--resume", str(run)]) == 0, "it is at its end"
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("val_acc 0.")
    assert "nan" not in shown
    config = json.loads((run / "config.json").read_text())["train"]
    assert (config["data"], config["devices"], config["shares"]) == (SMALL, "cpu", None)


def test_a_resumed_run_has_the_data_that_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where they were found by $MANYHANDS_DATA."""
    data, run, home = tmp_path / "data", tmp_path / "run", tmp_path / "home"
    shutil.copytree(SMALL, data)
    monkeypatch.setenv("MANYHANDS_DATA", str(data))
    begin = ["train", "--model", "mlp", "--epochs", "1", "--devices", "cpu", "--precision", "fp32", "--quiet"]
    assert main([*begin, "--run", str(run)]) == 0
    assert json.loads((run / "config.json").read_text())["train"]["data"] == str(data)
    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    capsys.readouterr()
    go_on = ["train", "--resume", str(run), "--quiet"]
    assert main([*go_on, "--epochs", "2", "--lr", "0.2"]) == 0
    shown = capsys.readouterr().out
    assert f"data: {data}; " in shown
    assert "lr 0.2 instead of 0.05" in shown
    data.rename(home)
    assert main(go_on) == 1
    assert str(data) in capsys.readouterr().err
    assert main([*go_on, "--data", str(home), "--epochs", "3"]) == 0


def test_folders_that_cannot_be_are_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("dear")
    options = ["train", "--model", "mlp", "--epochs", "1", "--devices", "cpu", "--data", SMALL, "--quiet"]
    for wrong in (file, file / "below", Path("/proc/x")):
        assert main([*options, "--run", str(wrong)]) == 1
        assert str(wrong) in capsys.readouterr().err
    run = tmp_path / "run"
    assert main([*options, "--run", str(run)]) == 0
    for wrong in (file, file / "below", Path("/proc/x")):
        assert main(["convert", str(run), "--to", "jax", "--out", str(wrong)]) == 1
        assert str(wrong) in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), "--to", "jax"]) == 1


@pytest.mark.pictures
def test_without_matplotlib_there_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    options = ["--model=mlp", "--max-time", "1", "--devices", "cpu", "--data", SMALL, "--run", str(tmp_path / "run")]
    assert main(["train", *options]) == 0
    *_, note, run, last = capsys.readouterr().out.splitlines()
    assert note == "no picture: the curves cannot be drawn: matplotlib is not installed. Run: pip install matplotlib"
    assert run == f"run: {tmp_path / 'run'}"
    assert last.startswith("val_acc 0.")


FULL = """
import resource, sys
from manyhands.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("limit", "epochs", "missing"),
    [
        pytest.param(20_000, 1, ["there is no checkpoint"], marks=pytest.mark.long),
        (2_500, 20, ["there is no checkpoint", "lacks the metrics"]),
    ],
)
def test_a_disk_that_is_full_is_no_success(tmp_path: Path, limit: int, epochs: int, missing: list[str]) -> None:
    """The limit of a file's size stands in for it: config.json fits, checkpoints do not, nor do many metrics."""
    run = tmp_path / "run"
    options = ["--model", "mlp", "--epochs", str(epochs), "--batch-size", "1000", "--devices", "cpu", "--data", SMALL]
    command = [sys.executable, "-c", FULL, str(limit), "train", *options, "--run", str(run)]
    # Python keeps what fits of a compiled module, too, and the next process would read that.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert all(words in done.stderr for words in missing), done.stderr
    assert "There is no older one." in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].startswith("val_acc 0.")
    assert list((run / "checkpoints").iterdir()) == []


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new"
    wrong = [
        (["--resume", str(tmp_path / "nowhere"), "--data", SMALL], "no run"),
        (["--data", str(tmp_path)], "train-images-idx3-ubyte"),
    ]
    for options, words in wrong:
        assert main(["train", *options]) == 1
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--data", SMALL, "--lr", "nan", "--run", str(new)])
    assert "give a number of zero or more" in capsys.readouterr().err
    assert not new.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "tpu"], "--devices tpu: 'tpu' is not the name of a device. Write gpu (all of them), 2 "),
        (["--devices", "cpu,cpu"], "cpu appears more than once in [cpu, cpu]"),
        (["--devices", "cpu:3", "--shares", "1,2"], "2 shares for 3 devices"),
        (["--devices", "cpu:2", "--batch-size", "1"], "smaller than the number of devices"),
    ],
)
def test_devices_that_cannot_be_leave_no_folder(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data", SMALL, "--run", str(tmp_path / "new"), *options]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("sent", "devices"), [(signal.SIGINT, "cpu:2"), (signal.SIGTERM, "cpu")])
def test_a_stopped_run_has_its_code_and_says_how_to_go_on(sent: signal.Signals, devices: str, tmp_path: Path) -> None:
    how = ["train", "--model", "mlp", "--devices", devices, "--data", SMALL, "--batch-size", "16"]
    how += ["--max-steps", "1000", "--run", str(tmp_path / "cut"), "--checkpoint-every", "5"]
    process = subprocess.Popen([sys.executable, "-m", "manyhands", *how], stderr=subprocess.PIPE, text=True)
    while store.latest(tmp_path / "cut" / "checkpoints") is None:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(sent)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + sent
    assert f"manyhands train --resume {tmp_path / 'cut'}" in errors
    assert "Traceback" not in errors


SCRIPT = """
import torch

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)

def make():
    torch.manual_seed(0)
    return Mine(), (torch.randn(900, 6), torch.randn(900, 1)), torch.nn.functional.mse_loss
"""


PADDED = """
import torch
from torch.nn import functional

class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7))

    def training_step(self, batch):
        mask = batch[1] != 0
        losses = functional.cross_entropy(self.net(batch[0]).transpose(1, 2), batch[1], reduction="none")
        return (losses * mask).sum() / mask.sum()

def make():
    torch.manual_seed(0)
    tokens = torch.randint(1, 7, (2000, 9))
    tokens[1900:, 3:] = 0  # sorted by length: only the last texts are short
    return Language(), (tokens[:, :-1], tokens[:, 1:])
"""


DROPS = """
def drops():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    return net, (torch.randn(40, 4), torch.randint(3, (40,)))
"""


@pytest.mark.long
def test_parity_of_a_users_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def parity(name: str, text: str, function: str, *options: str) -> tuple[int, str, str]:
        (tmp_path / name).write_text(text)
        code = main(["parity", f"{tmp_path / name}:{function}", *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, shown, errors = parity("script.py", SCRIPT, "make", "--devices", "2")
    assert code == 0, shown + errors
    assert shown.count(" equal") == 2
    assert "2:1" in shown
    code, shown, _ = parity("drops.py", SCRIPT + DROPS, "drops", "--devices", "2")
    assert code == 1
    assert "Layers that draw random numbers, as Dropout, draw others on every device" in shown
    code, _, errors = parity("padded.py", PADDED, "make", "--devices", "2")
    assert code == 1
    assert "not a mean over the samples" in errors
    assert "mh.LossSum(total, count)" in errors
    code, _, errors = parity("model.py", "import torch\ndef make(): return torch.nn.Linear(4, 3)\n", "make")
    assert code == 1
    assert "make returns a Linear: let it return (model, (X, y)), or" in errors
    assert main(["parity", "nothing"]) == 1
    assert "script.py:function" in capsys.readouterr().err
