"""``manyhands train``, ``parity`` and ``convert`` in every framework, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

from support import run_command

from manyhands.training.data.fashion_mnist import SUBSET_DIRECTORY

SMALL = str(SUBSET_DIRECTORY)
KEPT = ("--checkpoint-every", "20", "--keep-checkpoints", "2", "--on-nan", "continue")


def test_train_and_go_on(framework: str, tmp_path: Path) -> None:
    run = tmp_path / "mine"
    how = ("--framework", framework, "--model", "mlp", "--devices", "cpu:2", "--data", SMALL, "--run", str(run))
    first = run_command("train", *how, "--epochs", "1", "--precision", "fp64", *KEPT)
    assert first.returncode == 0, first.stderr
    last = first.stdout.splitlines()[-1]
    assert last.startswith("test acc 0.")
    assert "sec/epoch on [" in last
    assert first.stderr.count("epoch 1: ") == 1
    assert [path.name for path in (run / "checkpoints").iterdir()]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "config.json").read_text())["train"]["framework"] == framework

    again = run_command("train", *how, "--epochs", "2")
    assert again.returncode == 1
    assert f"manyhands train --resume {run}" in again.stderr

    second = run_command("train", "--resume", str(run), "--epochs", "2", "--lr", "0.01")
    assert second.returncode == 0, second.stderr
    assert "--lr 0.01: the run was begun with 0.05" in second.stdout
    assert second.stdout.splitlines()[-1].partition(" on ")[2] == last.partition(" on ")[2], "the run's devices"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["samples"] == 4000
    settings = json.loads((run / "config.json").read_text())["settings"]
    kept = (settings["precision"], settings["checkpoints"], settings["step"]["on_nan"])
    assert kept == ("fp64", {"every": 20, "keep": 2}, "continue"), "as the run was begun"
    assert rows[1]["train_loss"] < rows[0]["train_loss"]

    other = "jax" if framework == "torch" else "torch"
    converted = run_command("convert", str(run), "--to", other)
    assert converted.returncode == 0, converted.stderr
    assert f"from {framework} to {other}" in converted.stdout


def test_parity(framework: str) -> None:
    result = run_command("parity", "mlp", "--framework", framework, "--devices", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" equal") == 4
