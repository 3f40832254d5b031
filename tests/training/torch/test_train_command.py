"""``manyhands train`` and ``manyhands parity``, as a user runs them."""

from __future__ import annotations

import doctest
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import run_command

import manyhands.training
from manyhands.cli import main, train
from manyhands.errors import BadDevice, BadShares
from manyhands.training import checkpoint

SMALL = str(Path(manyhands.training.__file__).parent / "data" / "fashion-mnist-small")


def test_from_the_data_to_the_picture_and_on(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    common = ("--data", SMALL, "--run", str(run), "--checkpoint-every", "20")
    first = run_command("train", "--model", "mlp", "--epochs", "1", "--devices", "cpu:2", *common)
    assert first.returncode == 0, first.stderr
    assert "4,000 to train on, 1,000 to test with" in first.stdout
    assert first.stdout.splitlines()[-1].startswith("test acc 0.")
    assert first.stdout.splitlines()[-1].endswith("sec/epoch on [cpu, cpu]")
    assert first.stderr.count("epoch 1: ") == 1  # one display, whatever the number of processes
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "config.json").read_text())["train"]["model"] == "mlp"
    assert len(list((run / "checkpoints").iterdir())) >= 1

    second = run_command("train", "--resume", str(run), "--epochs", "2", "--data", SMALL)
    assert second.returncode == 0, second.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["samples"] == 4000
    assert rows[1]["train_loss"] < rows[0]["train_loss"]

    other = run_command("train", "--resume", str(run), "--epochs", "3", "--data", SMALL, "--seed", "9")
    assert other.returncode == 1
    assert "seed=0" in other.stderr


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    nowhere = run_command("train", "--resume", str(tmp_path / "nowhere"), "--data", SMALL)
    assert nowhere.returncode == 1
    assert "no run" in nowhere.stderr
    empty = run_command("train", "--data", str(tmp_path))
    assert empty.returncode == 1
    assert "train-images-idx3-ubyte" in empty.stderr
    new = tmp_path / "new"
    silly = run_command("train", "--data", SMALL, "--lr", "nan", "--run", str(new))
    assert "is not a learning rate" in silly.stderr
    assert not new.exists()
    assert "Traceback" not in nowhere.stderr + empty.stderr + silly.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "tpu"], "not the name of a device"),
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


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "manyhands", "train", "--model", "mlp", "--epochs", "1000", "--devices", "cpu:2"]
    command += ["--data", SMALL, "--run", str(run), "--checkpoint-every", "5"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while checkpoint.latest(run / "checkpoints") is None:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"manyhands train --resume {run}" in errors
    assert "Traceback" not in errors


def test_devices_and_shares_are_read() -> None:
    assert doctest.testmod(train).failed == 0
    assert train.parse_devices("gpu:0, cpu", gpus=1) == (["gpu:0", "cpu"], 1)
    assert train.parse_devices("2", gpus=2) == (["gpu:0", "gpu:1"], 1)
    for wrong in ("3", "0", "cpu:x", "cpu:0"):
        with pytest.raises(BadDevice):
            train.parse_devices(wrong, gpus=2)
    assert train.parse_shares("0.7,0.3") == [0.7, 0.3]
    assert train.parse_shares("measured") == "measured"
    with pytest.raises(BadShares):
        train.parse_shares("a,b")


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


def test_parity_of_a_users_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run_command("parity", f"{tmp_path / 'script.py'}:make", "--devices", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" equal") == 4
    assert "2:1" in result.stdout
    wrong = run_command("parity", "nothing")
    assert wrong.returncode == 1
    assert "script.py:function" in wrong.stderr
