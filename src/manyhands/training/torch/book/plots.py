"""What a model of the book plots while it computes a step.

The book's models draw their curves themselves: ``training_step`` and ``validation_step`` call ``self.plot(key, value,
train)``, which asks the book's trainer for the position on the x-axis and reads the value on the host, and
``validation_step`` returns nothing. Here the trainer draws. For the time of a job it takes the place of ``plot``:
nothing is read on the host, and the loss and the accuracy that a validation step plots are those of the epoch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from manyhands.training.torch.book.module import Module


class Plots:
    """Stands in for ``plot`` of a model, and has the values of a validation step."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __call__(self, key: str, value: Any, train: bool) -> None:
        # Not in training: a kept value would hold the memory of its step.
        if not train:
            self._values[key] = value

    def take(self) -> dict[str, Any]:
        """The values since the last call, by key."""
        values, self._values = self._values, {}
        return values


def plots_of(model: torch.nn.Module) -> Plots | None:
    """What :func:`take_over` has put there."""
    plots = vars(model).get("plot")
    return plots if isinstance(plots, Plots) else None


def is_of_the_book(model: torch.nn.Module) -> bool:
    """Whether a model plots as the book's do: ours, d2l's, or a reader's own copy of them."""
    plot = getattr(type(model), "plot", None)
    if isinstance(model, Module):
        return plot is Module.plot
    return callable(plot) and hasattr(model, "board") and [*inspect.signature(plot).parameters][1:] == _ARGUMENTS


_ARGUMENTS = ["key", "value", "train"]


def take_over(model: torch.nn.Module) -> None:
    """Take the place of a model's ``plot``, if it is of the book."""
    if is_of_the_book(model):
        vars(model)["plot"] = Plots()


@contextlib.contextmanager
def taken_over(model: torch.nn.Module) -> Iterator[None]:
    """The same for a time."""
    take_over(model)
    try:
        yield
    finally:
        if plots_of(model) is not None:
            del vars(model)["plot"]
