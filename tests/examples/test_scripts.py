"""The scripts of ``examples/`` run as they stand."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import free_port

from manyhands import torch as mh

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = EXAMPLES / "torchrun" / "train.py"


def run(monkeypatch: pytest.MonkeyPatch, script: Path, *arguments: str) -> None:
    """In this process: four more starts of PyTorch would take longer than the scripts."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


def test_a_loop_by_hand_gives_the_answer_of_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mh.virtual_devices(2):
        run(monkeypatch, EXAMPLES / "scripts" / "plain_loop.py")
    shown = capsys.readouterr().out
    assert float(shown.rpartition(" ")[2]) < 1e-5
    losses = re.findall(r"epoch \d: loss (\S+)", shown)
    assert losses[:3] == losses[3:]


def test_a_gan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(monkeypatch, EXAMPLES / "scripts" / "gan.py", "--epochs", "2", "--plot", str(tmp_path / "gan.png"))
    assert "mean distance from the ring" in capsys.readouterr().out
    assert (tmp_path / "gan.png").stat().st_size > 1000


@pytest.mark.long
def test_batches_that_are_dicts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, EXAMPLES / "scripts" / "dict_model.py", "--epochs", "1", "--devices", "cpu:2")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) < 1e-6


def test_images_in_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, EXAMPLES / "scripts" / "custom_dataset.py", "--epochs", "1")
    assert "val_acc" in capsys.readouterr().out


# --- torchrun and SLURM


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **quiet}, **pipes)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out


@pytest.mark.long
def test_the_script_on_two_machines(tmp_path: Path) -> None:
    """Two launchers, as the README has them, that meet on the loopback; the first one prints and keeps the run."""
    text = (EXAMPLES / "torchrun" / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("torchrun --nnodes 2 --node-rank 1")]
    line = line.replace("node0", "127.0.0.1").replace("29500", str(free_port())).replace("-node 4", "-node 1")
    options = shlex.split(line)[1:-1]
    launchers = []
    for node in range(2):
        options[options.index("--node-rank") + 1] = str(node)
        job = [str(TRAIN), "--epochs", "1", "--devices", "cpu", "--folder", str(tmp_path / f"{node}")]
        launchers.append(start(sys.executable, "-m", "torch.distributed.run", *options, *job))
    first, second = map(finish, launchers)
    assert "on [cpu of rank 0, cpu of rank 1]" in first
    assert not second
    assert (tmp_path / "0" / "checkpoints").is_dir()
    assert not (tmp_path / "1").exists()


SBATCH = sorted((EXAMPLES / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.stem)
def test_a_batch_script_is_good_bash_and_runs_the_example(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    (line,) = re.findall(r"^srun python (\S+)", script.read_text(), flags=re.MULTILINE)
    assert (EXAMPLES.parent / line).samefile(TRAIN)
    assert f"`{script.name}`" in (EXAMPLES / "slurm" / "README.md").read_text()


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (138, True), (143, False)])
def test_a_job_whose_time_is_over_is_queued_again(code: int, requeued: bool, tmp_path: Path) -> None:
    """SLURM's commands are stand-ins: what the script does with the trainer's exit codes is tested, not SLURM."""
    for name, body in (("srun", f"exit {code}"), ("scontrol", f"echo $@ > {tmp_path}/asked")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    finish(
        start("bash", str(EXAMPLES / "slurm" / "requeue.sbatch"), PATH=path, SLURM_JOB_ID="7"),
        code=0 if requeued else code,
    )
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
