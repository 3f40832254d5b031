"""What may act on the passes of a step while they are warmed up and captured: a graph then repeats its work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.training.torch.fast.lanes.lanes import StepLanes


@dataclass
class SizedStep:
    """The step for one batch size, and its graph."""

    window: torch.Tensor
    forward: Callable[..., Any]
    compiled: bool
    lanes: StepLanes | None = None
    warm: int = 0  # warm-up steps so far; negative: this many steps as written are still to run
    replay: Callable[[], object] | None = None  # replays the graph
    notes: list[str] = field(default_factory=list)  # what is replaced and what runs on side lanes, in words

    @property
    def size(self) -> int:
        return len(self.window)


class Extension:
    """Acts around the passes of a step. Subclasses override the moments at which they act."""

    # A dispatch mode, which a compiled step does not see.
    is_mode = False
    # Wants steps as written before the warm-up, and acts in the last of them.
    searches = False
    # What is not done, in words, where a failure may be the fault of this mode; modes without any end with the others.
    without = ""

    def search(self, sized: SizedStep) -> AbstractContextManager[Any]:
        """Around the passes of the last step as written."""
        return nullcontext()

    def after_forward(self, loss: torch.Tensor) -> None:
        """Between those passes."""

    def begin(self, sized: SizedStep) -> None: ...

    def forward(self, sized: SizedStep) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, sized: SizedStep) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_backward(self, sized: SizedStep, loss: torch.Tensor) -> None: ...

    def explain(self, sized: SizedStep) -> str | None:
        """What it did in this step, in words."""
