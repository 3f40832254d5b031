"""Workers that wait for the next job, or for a callback in the caller. Under torchrun: ranks/test_launchers.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from training_cases import fit, mlp, vectors

from manyhands.training.torch.workers import pool


class Data(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Writes down which process has let go of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.samples = folder, vectors()

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        X, y = self.samples
        return X[number], y[number]

    def __len__(self) -> int:
        return len(self.samples[0])

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def test_workers_that_wait_hold_no_data_of_the_job_before(tmp_path: Path) -> None:
    data, until = Data(tmp_path), time.monotonic() + 60
    fit(mlp(), data, 2, max_epochs=1)
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len({*map(int, (path.name for path in tmp_path.iterdir()))} - {os.getpid()}) == 2


class Answers:
    """The end of a worker's connection."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
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
    assert workers[0].connection.sent == [("answer", {"stop": None, "save": []})]
    assert not workers[1].connection.sent
    own._pass_on(workers[0], {"kind": "steps"}, lambda event: None)
    assert len(workers[0].connection.sent) == 1
    own._pass_on(workers[0], {"kind": "steps"}, say)
    assert len(workers[0].connection.sent) == 1
    own._pass_on(workers[0], {"kind": "steps"}, lambda event: {"stop": "enough"})
    assert workers[0].connection.sent[1:] == [("wish", {"stop": "enough"})]
