"""The experiments, one per module, in the order in which they are listed and run."""

from __future__ import annotations

import difflib
import importlib

from manyhands.errors import BadSettings
from manyhands.lab.experiment import Experiment

# The name of an experiment, and of its module with "_" for "-".
NAMES = (
    "cpu-or-gpu",
    "logging-norms",
    "how-linear",
    "eight-operations",
    "all-busy",
    "harder-graphs",
    "training-scaling",
    "unequal-devices",
    "steps-in-flight",
    "parameter-access",
    "many-small-tensors",
)


def load(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in NAMES:
        near = nearest(name)
        guess = f"; there are {', '.join(NAMES)}" if near is None else f"; did you mean {near}?"
        raise BadSettings(f"there is no experiment {name!r}{guess}")
    experiment: Experiment = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").run
    return experiment


def nearest(name: str) -> str | None:
    """The experiment that the user probably meant.

    >>> nearest("all_busy"), nearest("list")
    ('all-busy', None)
    """
    return next(iter(difflib.get_close_matches(name, NAMES, 1)), None)
