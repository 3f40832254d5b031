"""Workers that wait for the next job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from training_cases import fit, mlp, vectors


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
