"""What may act on the passes of a step while they are warmed up and captured: a graph then repeats its work."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.training.torch.fast.lanes.eager import StepLanes
from manyhands.training.torch.ranks.gradient_sum import Arrivals
from manyhands.training.torch.step.part import LossOf


@dataclass(eq=False)
class Passes:
    """Forward and backward over one kind of micro-batch, and their graph."""

    kind: Hashable
    size: int
    loss_of: LossOf
    compiled: bool
    lanes: StepLanes | None = None
    warm: int = 0  # warm-up steps so far; negative: this many steps as written are still to run
    replay: Callable[[], object] | None = None  # replays the graph
    arrivals: Arrivals | None = None  # the gradients that it computes
    notes: list[str] = field(default_factory=list)  # what is replaced and what runs on side lanes, in words


class Extension:
    """Acts around the passes of a step. Subclasses override the moments at which they act."""

    # A dispatch mode, which a compiled step does not see.
    is_mode = False
    # Wants steps as written before the warm-up, and acts in the last of them.
    searches = False
    # What is not done, in words, where this mode is left out after a failure; not all are worth a word.
    without = ""

    def search(self, passes: Passes) -> AbstractContextManager[Any]:
        """Around the passes of the last step as written."""
        return nullcontext()

    def after_forward(self, loss: torch.Tensor) -> None:
        """Between those passes."""

    def begin(self, passes: Passes) -> None: ...

    def forward(self, passes: Passes) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, passes: Passes) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_backward(self, passes: Passes, loss: torch.Tensor) -> None: ...

    def explain(self, passes: Passes) -> str | None:
        """What it did in these passes, in words."""
