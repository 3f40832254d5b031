"""What is to be trained, how, and what came of it. A job is sent to its workers as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from manyhands.training.settings import Settings
from manyhands.training.torch.objective import Objective
from manyhands.training.torch.sources import Source

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
Schedule = Callable[[float], float]
Say = Callable[[dict[str, Any]], None]


@dataclass
class Job:
    model: torch.nn.Module
    objective: Objective
    train: Source
    test: Source | None
    settings: Settings
    # An optimizer that holds the model's parameters, or what makes one.
    optimizer: torch.optim.Optimizer | MakeOptimizer
    # The learning rate's factor, given how much of the training is done (0 to 1).
    schedule: Schedule | None = None
    run: Path | None = None
    resume: Path | None = None


@dataclass
class Result:
    """What came of a job: one row per epoch, and what is worth knowing."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    shares: list[float] | None = None
    run: str | None = None

    @property
    def test_accuracy(self) -> float:
        accuracy = self.rows[-1].get("test_acc") if self.rows else None
        return math.nan if accuracy is None else float(accuracy)

    @property
    def seconds_per_epoch(self) -> float:
        """The mean over whole epochs, the first apart where there are others (it warms up)."""
        seconds = [row["seconds"] for row in self.rows if row.get("whole", True)]
        seconds = seconds[1:] or seconds
        return sum(seconds) / len(seconds) if seconds else math.nan

    def __str__(self) -> str:
        """The book's line."""
        accuracy = f"test acc {self.test_accuracy:.3f}, " if not math.isnan(self.test_accuracy) else ""
        return f"{accuracy}{self.seconds_per_epoch:.2f} sec/epoch on [{', '.join(self.devices)}]"
