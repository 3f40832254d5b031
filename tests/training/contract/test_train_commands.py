"""``manyhands train``, ``parity`` and ``convert`` in every framework, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_command

from manyhands.cli import main
from manyhands.training.data.fashion_mnist import SUBSET_DIRECTORY

SMALL = str(SUBSET_DIRECTORY)
KEPT = ("--checkpoint-every", "20", "--keep-checkpoints", "2", "--on-nan")


@pytest.mark.usefixtures("own_recipes")
def test_train_and_go_on(framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine"
    on_nan = "stop" if framework == "mxnet" else "continue"  # MXNet's trainer always stops
    how = ("--framework", framework, "--model", "mlp", "--devices", "cpu:2", "--data", SMALL, "--run", str(run))
    first = run_command("train", *how, "--epochs", "1", "--precision", "fp32", *KEPT, on_nan)
    assert first.returncode == 0, first.stderr
    assert "4,000 to train on, 1,000 to test with" in first.stdout
    last = first.stdout.splitlines()[-1]
    assert last.startswith("val_acc 0.")
    assert "sec/epoch on [" in last
    assert first.stderr.count("epoch 1: ") == 1
    assert [path.name for path in (run / "checkpoints").iterdir()]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "config.json").read_text())["train"]["framework"] == framework

    assert main(["train", *how, "--epochs", "2"]) == 1
    assert "holds a run already: give --resume auto to continue it" in capsys.readouterr().err

    assert main(["train", "--resume", str(run), "--epochs", "2", "--lr", "0.01"]) == 0
    said = capsys.readouterr()
    assert "resuming after step 32, in epoch 2 of 2, with max_epochs 2 instead of 1" in said.err
    assert said.out.splitlines()[-1].partition(" on ")[2] == last.partition(" on ")[2], "the run's devices"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["samples"] == 4000

    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().err
    assert "this run is finished, after step 64: nothing was trained. Give a larger max_epochs to train on" in said
    settings = json.loads((run / "config.json").read_text())["settings"]
    kept = (settings["precision"], settings["checkpoints"], settings["step"]["on_nan"])
    assert kept == ("fp32", {"every": 20, "keep": 2}, on_nan), "as the run was begun"
    assert rows[1]["train_loss"] < rows[0]["train_loss"]

    other = "jax" if framework == "torch" else "torch"
    assert main(["convert", str(run), "--to", other]) == 0
    assert f"from {framework} to {other}" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("own_recipes")
def test_parity(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["parity", "mlp", "--framework", framework, "--devices", "2"])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert said.out.count(" equal") in (1, 2)  # uneven shares, too, where there are any
