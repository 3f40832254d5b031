"""Tasks of an srun, without torchrun: one job. A signal to one stops all, and the job goes on to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import free_port

from manyhands.training.checkpoints import store

SCRIPT = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from training_cases import *
import manyhands.torch as mh

def stop(step):
    time.sleep(0.01)
    if step == 5 and os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0

def train(name, schedule):
    how = dict(batch_size=16, lr=0.1, precision="fp64", quiet=True, devices=["cpu"])
    trainer = mh.Trainer(run=os.path.join(sys.argv[1], name), resume="auto", schedule=mh.by_step(schedule),
                         limits=mh.Limits(max_steps=100), checkpoints=mh.Checkpoints(every=50), **how)
    return trainer.fit(mlp(dropout=0.5), vectors())

train("whole", lambda step: 1.0)
result = train("cut", stop)
assert result.devices == ["cpu of rank 0", "cpu of rank 1"], result.devices
"""


def run_tasks(script: Path, folder: Path) -> list[int]:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    step |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [task.communicate(timeout=200)[1] for task in tasks]
    assert not any("Traceback" in text for text in errors), errors
    return [task.returncode for task in tasks]


def test_tasks_of_srun_and_a_signal_to_one_of_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run_tasks(script, tmp_path) == [143, 143]
    stopped = store.load(tmp_path / "cut" / "checkpoints").step
    assert 5 < stopped < 100
    assert run_tasks(script, tmp_path) == [0, 0]
    whole, cut = (store.load(tmp_path / name / "checkpoints") for name in ("whole", "cut"))
    assert whole.step == cut.step == 100
    assert whole.blobs["model"] == cut.blobs["model"]
