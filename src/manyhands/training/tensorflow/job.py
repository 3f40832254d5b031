"""A job of TensorFlow's trainer as data: what to train, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manyhands.training.data.sources import Source
from manyhands.training.settings import Settings
from manyhands.training.tensorflow.checks import LabelCheck
from manyhands.training.tensorflow.objective import Objective


@dataclass
class Job:
    model: Any  # the caller's
    layers: Any  # the model whose layers are worked with: the same, or one like it in another precision
    objective: Objective
    optimizer: Any
    train: Source
    test: Source | None
    settings: Settings
    labels: LabelCheck | None = None
    notes: list[str] = field(default_factory=list)
