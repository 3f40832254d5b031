"""Shares that follow the speed of the ranks: the same update, whatever they are, and the slower one gets less."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from training_cases import Chunks, difference, fit, mlp, vectors

from manyhands.training.options import Step


def slow_on_the_first(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy; one rank takes its time for each sample."""
    if dist.is_initialized() and dist.get_rank() == 0:
        time.sleep(0.005 * len(y))
    return torch.nn.functional.cross_entropy(scores, y)


@pytest.mark.parametrize("kind", ["arrays", "dataset", "stream", "iterator"])
def test_measured_shares(kind: str) -> None:
    X, y = vectors(90 * 4)
    data = {
        "arrays": (X, y),
        "dataset": DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True, collate_fn=list_of),
        "stream": DataLoader(TensorDataset(X, y), batch_size=16, drop_last=True),
        "iterator": Chunks(X, y, 16),
    }[kind]
    alone, expected = fit(mlp(), data)
    both, result = fit(mlp(), data, 2, step=Step(shares="measured"), loss=slow_on_the_first)
    assert difference(alone, both) < 1e-12
    assert [row["samples"] for row in result.rows] == [row["samples"] for row in expected.rows]
    assert result.shares[0] < 0.4
    assert [note for note in result.notes if note.startswith("shares measured")]


def list_of(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]
