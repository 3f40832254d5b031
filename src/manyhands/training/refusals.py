"""Errors of the trainers, in the same words in every framework."""

from __future__ import annotations

from typing import Any

from manyhands.errors import BadBatch, BadSettings


def not_a_model(model: Any, kind: str) -> BadSettings:
    """The error for what a framework does not train; ``kind``: what it does, as ``a torch.nn.Module``."""
    if isinstance(model, type):
        name = model.__name__
        return BadSettings(f"the class {name} cannot be trained: give {kind} made of it, {name}(...) and not {name}")
    return BadSettings(f"a model of type {type(model).__name__} cannot be trained: give {kind}")


def no_target(batch: Any) -> BadBatch:
    """The error for a batch without a target where the loss needs one."""
    what = "this one has only one part" if isinstance(batch, (tuple, list)) else f"this is a {type(batch).__name__}"
    return BadBatch(
        f"a batch (inputs, target) is needed, and {what}: give both, or a model with a training_step(batch) of its own"
    )
