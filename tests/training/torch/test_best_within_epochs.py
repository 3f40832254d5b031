"""Evaluations within an epoch: callbacks and loggers see them, and a killed job continues to the same end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import mlp, vectors

from manyhands import torch as mh


class Killed(Exception):
    pass


class KillAt:
    """A schedule that leaves the rate alone and ends the training at one step."""

    def __init__(self, step: int | None) -> None:
        self.step, self.made = step, 0

    def __call__(self, done: float) -> float:
        if self.made == self.step:
            raise Killed
        self.made += 1
        return 1.0


def trained(run: Path, killed_at: int | None = None) -> tuple[torch.nn.Module, mh.Result, mh.BestCheckpoint]:
    """Three epochs of six steps, evaluated after every second one; a checkpoint after every third."""
    model, best = mlp(), mh.BestCheckpoint("val_loss", save_top_k=2)
    trainer = mh.Trainer(
        3,
        batch_size=15,
        lr=0.5,
        quiet=True,
        run=run,
        resume="auto",
        schedule=KillAt(killed_at),
        checkpoints=mh.Checkpoints(every=3),
        limits=mh.Limits(evaluate_every="2 steps"),
        callbacks=[best, mh.EMA(0.5), mh.EarlyStopping("val_loss", patience=100)],
        loggers=[mh.loggers.CSVLogger(every=5)],
    )
    return model, trainer.fit(model, vectors(), vectors(40)), best


def tables(run: Path) -> list[Any]:
    """Both tables without the column that is the time."""
    found = [
        [line.split(",") for line in (run / f"{name}.csv").read_text().splitlines()] for name in ("metrics", "steps")
    ]
    place = found[0][0].index("seconds")
    return [[row[:place] + row[place + 1 :] for row in found[0]], found[1]]


@pytest.mark.parametrize("killed_at", [7, 12])
def test_a_killed_job_keeps_the_same_best_checkpoints(tmp_path: Path, killed_at: int) -> None:
    whole, result, best = trained(tmp_path / "whole")
    run = tmp_path / "killed"
    with pytest.raises(Killed):
        trained(run, killed_at)
    model, again, best_again = trained(run)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), model.state_dict().values(), strict=True))
    assert [row["val_loss"] for row in again.rows] == [row["val_loss"] for row in result.rows]
    assert len(again.rows) == 9
    assert {path.name: value for path, value in best_again.best.items()} == {p.name: v for p, v in best.best.items()}
    assert sorted(path.name for path in (run / "best").iterdir()) == sorted(path.name for path in best.best)
    assert tables(run) == tables(tmp_path / "whole")
    assert [row[1] for row in tables(run)[0][1:]] == [str(step) for step in range(2, 19, 2)]
