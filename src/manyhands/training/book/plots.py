"""What a model of the book plots while it computes a step.

The book's models draw their curves themselves: ``training_step`` and ``validation_step`` call ``self.plot(key, value,
train)``, which asks the book's trainer for the position on the x-axis and reads the value on the host, and
``validation_step`` returns nothing. Here the trainer draws. It takes the place of ``plot``: nothing is read on the
host, and the loss and the accuracy that a validation step plots are those of the epoch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from manyhands.training.loss import own_step
from manyhands.training.refusals import other_step


class Plotting:
    """``plot`` of our own ``Module``."""

    def plot(self, key: str, value: Any, train: bool) -> None:
        """Accepts a value as the book's ``plot`` does.

        The trainer draws: it takes the loss and the accuracy (``"acc"``) that a ``validation_step`` plots.
        """


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


def plots_of(model: Any) -> Plots | None:
    """What :func:`take_over` has put there."""
    plots = vars(model).get("plot")
    return plots if isinstance(plots, Plots) else None


def is_of_the_book(model: Any) -> bool:
    """Whether a model plots as the book's do: ours, d2l's, or a reader's own copy of them."""
    plot = getattr(type(model), "plot", None)
    if isinstance(model, Plotting):
        return plot is Plotting.plot
    return callable(plot) and hasattr(model, "board") and [*inspect.signature(plot).parameters][1:] == _ARGUMENTS


_ARGUMENTS = ["key", "value", "train"]


def take_over(model: Any) -> None:
    """Take the place of a model's ``plot``, if it is of the book."""
    if is_of_the_book(model):
        vars(model)["plot"] = Plots()


@contextlib.contextmanager
def taken_over(model: Any) -> Iterator[None]:
    """The same for a time."""
    take_over(model)
    try:
        yield
    finally:
        if plots_of(model) is not None:
            del vars(model)["plot"]


def plotted_loss(returned: Any, plotted: dict[str, Any], training_step: Callable[[], Any]) -> Any:
    """The loss of a validation step that may have plotted it and returned nothing.

    One that plots no loss has that of training: the book's language models, for example, plot the perplexity alone.
    """
    if returned is not None:
        return returned
    return plotted["loss"] if "loss" in plotted else training_step()


def call_step(model: Any, name: str, batch: Any) -> tuple[Any, Any | None]:
    """What ``training_step`` or ``validation_step`` of a model returns, and the accuracy that it has plotted."""
    with taken_over(model):
        try:
            returned = getattr(model, name)(batch)
        except TypeError as error:
            if (refusal := other_step(model, name)) is None:
                raise
            raise refusal from error
        plots = plots_of(model)
        if plots is None or name != "validation_step":
            return returned, None
        plotted = plots.take()
        return plotted_loss(returned, plotted, lambda: model.training_step(batch)), plotted.get("acc")


def why_no_accuracy(model: Any, *, training: bool) -> str | None:
    """Why there will be no accuracy of a model with its own step; None: its validation step plots something."""
    name = own_step.step_name(model, training=training)
    code = getattr(getattr(type(model), name, None), "__code__", None)
    if name == "validation_step" and is_of_the_book(model) and "plot" in getattr(code, "co_names", ()):
        return None
    return own_step.why_no_accuracy(name)
