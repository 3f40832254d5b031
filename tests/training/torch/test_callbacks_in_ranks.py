"""Callbacks with several processes: they run in one of them, and what they decide reaches all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from manyhands.training.torch.workers import pool

SCRIPT = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from training_cases import *
from manyhands import torch as mh

class Calls(mh.Callback):
    every = 2
    def __init__(self):
        self.steps, self.pid = [], None
    def on_fit_start(self, training):
        self.pid = os.getpid()
    def on_steps(self, training, figures):
        self.steps.append([training.step, figures["train_loss"]])
    def on_evaluation(self, training, figures):
        if training.epoch == 2:
            training.stop("enough")

calls, model = Calls(), mlp()
how = dict(batch_size=30, lr=0.1, precision="fp64", quiet=True, devices=["cpu"])
result = mh.Trainer(5, callbacks=[calls, mh.EMA(0.5)], **how).fit(model, vectors(), vectors(30))
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()
with open(sys.argv[1] + os.environ.get("RANK", ""), "w") as file:
    json.dump([len(result.rows), result.stopped, calls.pid is not None, calls.steps, weights], file)
"""


def test_under_torchrun_the_first_rank_calls_and_all_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those over all ranks: the same as on one device."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, script, out], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", [str(script), str(out)])
    exec(compile(SCRIPT, str(script), "exec"), {"__name__": "__main__"})
    alone, first, second = (json.loads((tmp_path / f"out{rank}").read_text()) for rank in ("", "0", "1"))
    assert [one[:3] for one in (alone, first, second)] == [
        [2, "enough", True],
        [2, "enough", True],
        [2, "enough", False],
    ]
    assert second[3] == []
    assert [step for step, _ in first[3]] == [2, 4, 6]
    for (_, ours), (_, theirs) in zip(first[3], alone[3], strict=True):
        assert abs(ours - theirs) < 1e-12
    assert first[4] == second[4]
    assert max(abs(a - b) for a, b in zip(first[4], alone[4], strict=True)) < 1e-12


class Answers:
    """The end of a worker's connection."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_bytes(self, message: bytes) -> None:
        self.sent.append(message)


def test_the_time_of_a_callback_is_no_silence_of_a_worker() -> None:
    """Workers that wait for an answer do not hang."""
    workers: list[Any] = [pool._Worker(rank, "cpu", None, Path(), Answers(), heard=1000.0) for rank in range(2)]  # type: ignore[arg-type]
    own = pool.Pool([], workers=workers)

    def say(event: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return {"stop": None, "save": []}

    own._pass_on(workers[0], {"kind": "evaluation", "asks": True}, say)
    assert all(worker.heard >= 1000.05 for worker in workers)
    assert workers[0].connection.sent == [b'answer {"stop": null, "save": []}']
    assert not workers[1].connection.sent
    own._pass_on(workers[0], {"kind": "steps"}, say)
    assert len(workers[0].connection.sent) == 1
