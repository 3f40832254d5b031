"""Models that compute their loss themselves, in ``training_step`` and ``validation_step``."""

from __future__ import annotations

from typing import Any


def step_name(model: Any, *, training: bool) -> str:
    """Which of the two methods is called; without a ``validation_step`` it is always ``training_step``."""
    return "training_step" if training or not hasattr(model, "validation_step") else "validation_step"


def why_no_accuracy(name: str) -> str:
    """Why there is no accuracy where this method computes the loss."""
    return f"{name} computes the loss itself, and the trainer does not see the outputs"
