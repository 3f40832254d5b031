"""Models that compute their loss themselves, in ``training_step`` and ``validation_step``.

A base class may have these methods only as defaults: :func:`default` marks them, and a model that does not override
them is trained as one without.

The models of textbooks draw their curves themselves: a step calls ``self.plot(key, value, train)``, which reads the
value on the host. Here the trainer draws, and takes the place of ``plot``: the loss and the accuracy that a validation
step plots are those of the epoch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from manyhands.errors import BadSettings
from manyhands.training.refusals import other_step

Method = TypeVar("Method", bound=Callable[..., Any])


def default(method: Method) -> Method:
    """Mark a method of a base class as a default, which says nothing about a model."""
    vars(method)["is_default"] = True
    return method


def is_default(model: Any, name: str) -> bool:
    """Whether a model has this method, and only as a default of its base class."""
    return bool(getattr(getattr(type(model), name, None), "is_default", False))


def step_name(model: Any, *, training: bool) -> str:
    """Which of the two methods is called; without a ``validation_step`` it is always ``training_step``."""
    return "training_step" if training or not hasattr(model, "validation_step") else "validation_step"


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
    """What :func:`take_over_plots` has put there."""
    plots = vars(model).get("plot")
    return plots if isinstance(plots, Plots) else None


def take_over_plots(model: Any) -> None:
    """Take the place of a model's ``plot``, if it plots its values while it computes, as those of textbooks do."""
    plot = getattr(type(model), "plot", None)
    of_book = callable(plot) and hasattr(model, "board") and [*inspect.signature(plot).parameters][1:] == _ARGUMENTS
    if of_book or is_default(model, "plot"):
        vars(model)["plot"] = Plots()


_ARGUMENTS = ["key", "value", "train"]


@contextlib.contextmanager
def plots_taken_over(model: Any) -> Iterator[None]:
    """The same for a time."""
    take_over_plots(model)
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
    with plots_taken_over(model):
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


def resolve_loss(loss: Any, by_name: Mapping[str, Any], kinds: tuple[type, ...]) -> Any:
    """The loss for a function, an object, a class or a name; ``kinds`` of losses need no call to be one."""
    if isinstance(loss, str) and loss.lower() in by_name:
        return by_name[loss.lower()]
    if loss is None or isinstance(loss, kinds):
        return loss
    if isinstance(loss, str):
        raise BadSettings(f"loss={loss!r}: give a function, or one of {', '.join(by_name)}")
    if not callable(loss):
        raise BadSettings(f"loss={loss!r} is of type {type(loss).__name__}: give a function")
    if not isinstance(loss, type):
        return loss
    try:
        return loss()
    except TypeError as error:
        raise BadSettings(f"loss={loss.__name__} is a class: make one, {loss.__name__}(...) ({error})") from error


@dataclass(frozen=True)
class LossSum:
    """A mean loss, given as a sum and as what the sum is divided by.

    Return it from a loss or a ``training_step`` whose mean is not over samples: over the tokens that are not padding,
    or over weighted labels. On several devices, or with ``accumulate``, a batch is processed in parts, and the mean of
    the parts' means is not the mean of the batch. With a ``LossSum`` the trainer adds up all sums and all counts first
    and divides once, so that N devices make the update that one device makes::

        def training_step(self, batch):
            scores = self(batch["tokens"])
            total = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
            return mh.LossSum(total, count=(batch["labels"] != -100).sum())

    ``total`` and ``count`` are scalar tensors of the framework (``count`` may be a plain number). The gradient of
    ``count`` is not taken.
    """

    total: Any
    count: Any
