"""A figure that a callback follows, and whether less or more of it is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Row, Values

Mode = Literal["min", "max"]
# Of a row, what is no figure of the model.
_NO_FIGURES = ("epoch", "step", "samples", "seconds", "whole")
_SINGLE = ("train_loss", "train_acc", "val_loss", "val_acc")


class Monitor:
    """Finds its figure where it appears: ``val_...`` after each evaluation, others at the end of each epoch."""

    def __init__(self, name: str, mode: Mode | None, who: str) -> None:
        if not isinstance(name, str) or not name:
            raise BadSettings(f"{who}({name!r}): give the name of a figure, as 'val_loss'")
        if mode not in ("min", "max", None):
            raise BadSettings(f"{who}(mode={mode!r}): choose one of min, max; None is max for accuracies, else min")
        self.name, self._who = name, who
        self.mode: Mode = mode or ("max" if name.endswith(("_acc", "_accuracy")) else "min")

    @property
    def is_of_evaluations(self) -> bool:
        """Whether evaluations have the figure; else epochs do."""
        return self.name.startswith("val_")

    def after_evaluation(self, figures: Values) -> float | None:
        """The figure of this evaluation; None where it is one of an epoch."""
        if self.name in figures:
            return figures[self.name]
        if self.is_of_evaluations:
            raise self._unknown(figures)
        return None

    def at_epoch_end(self, row: Row) -> float | None:
        """The figure of this epoch; None where evaluations have it."""
        if self.is_of_evaluations:
            return None
        if self.name in _NO_FIGURES or row.get(self.name) is None:
            raise self._unknown(_figures_of(row))
        return float(row[self.name])

    def _unknown(self, names: Iterable[str]) -> BadSettings:
        return BadSettings(f"{self._who}: there is no figure {self.name!r}. There are {', '.join(sorted(names))}")

    def is_better(self, value: float, than: float | None, min_delta: float = 0.0) -> bool:
        """NaN is never better; a number is better than none. What is not one number cannot be compared."""
        if not isinstance(value, (int, float)):
            raise several_values(self._who, self.name, value)
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - min_delta if self.mode == "min" else value > than + min_delta


def several_values(who: str, name: str, value: object) -> BadSettings:
    """The error for a figure that is followed and is not one number."""
    return BadSettings(
        f"{who}: {name!r} has several values ({value}), which are not better or worse than others: let the metric "
        f"return one number, or a dict of names and numbers, of which each is a figure ({name}_<key>)"
    )


def check_monitors(followed: Mapping[str, str], known: Sequence[str], why_not: Callable[[str], str | None]) -> None:
    """Refuse, before the first step, to follow a figure that there will not be.

    ``followed``: who follows which figure; ``why_not``: why a figure that might be there is not.
    """
    for who, name in followed.items():
        if not is_known(name, known):
            raise BadSettings(f"{who}: {unknown(name, known)}")
        if (why := why_not(name)) is not None:
            figures = ", ".join(figure for figure in known if not figure.endswith("_acc"))
            raise BadSettings(
                f"{who}: there is no figure {name!r}, because {why}. There are {figures}; metrics={{'name': function}} "
                "adds others"
            )


def known_figures(metrics: Iterable[str], *, validates: bool, rates: bool) -> list[str]:
    """The names of all figures that a training may have: accuracies are there where targets are classes."""
    tested = [f"val_{name}" for name in ("loss", "acc", *metrics)] if validates else []
    return sorted(["train_loss", "train_acc", *tested, *(["lr"] if rates else [])])


def is_known(name: str, known: Iterable[str]) -> bool:
    """Whether a figure of this name may come; a metric (or the rates) may have several values, each with its name."""
    return any(name == figure or (figure not in _SINGLE and name.startswith(f"{figure}_")) for figure in known)


def unknown(name: str, known: Sequence[str]) -> str:
    """That there is no such figure, and which there are, in words."""
    validates = "val_loss" in known or not name.startswith("val_")
    missing = "" if validates else ", because there are no validation data: give some"
    return f"there is no figure {name!r}{missing}. There are {', '.join(known)}"


def _figures_of(row: Row) -> list[str]:
    return [name for name, value in row.items() if name not in _NO_FIGURES and value is not None]
