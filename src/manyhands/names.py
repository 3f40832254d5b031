"""The names of ``manyhands.torch``, ``.jax``, ``.tensorflow`` and ``.mxnet``, and where each is loaded from.

These modules bind the verbs of placement when they are imported. Everything else (training, ``parallel``, tasks) is
loaded on first use, so that a program which only moves tensors does not wait for a trainer. A type checker does not
follow a module's ``__getattr__``, so each module imports the same names again under ``TYPE_CHECKING``
(:mod:`manyhands.names_for_types` has the names that are the same objects in all of them), and
``tests/test_structure.py`` compares them with this list.

The book's names are in ``manyhands.book.<framework>``. They are found here too, although they are not listed: the
book's programs say ``from manyhands import torch as d2l``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from manyhands.book import NAMES as BOOK_NAMES
from manyhands.placement.verbs import Verbs

VERBS = tuple(name for name in vars(Verbs) if not name.startswith("_"))

_LATE = {
    "manyhands.audit.guard": ("assert_no_stalls", "guard"),
    "manyhands.book.{framework}": ("Trainer", "load_model", "load_weights"),
    "manyhands.forecast.measured": ("forecast",),
    "manyhands.parallel.handed_over": ("parallel",),
    "manyhands.tasks.scope": ("task",),
    "manyhands.training.callbacks.builtin": ("BestCheckpoint", "EMA", "EarlyStopping", "LearningRateMonitor"),
    "manyhands.training.callbacks.callback": ("Callback",),
    "manyhands.training.callbacks.display": ("Progress",),
    "manyhands.training.callbacks.loggers": ("loggers",),
    "manyhands.training.loss.own_step": ("LossSum",),
    "manyhands.training.options": ("Checkpoints", "Limits", "Step", "Workers"),
    "manyhands.training.result": ("Result",),
    "manyhands.training.schedules": ("PerEpoch", "PerStep", "by_step", "one_cycle"),
    "manyhands.training.stopping": ("Stopped",),
}
# Names that PyTorch's module loads from elsewhere, or that only it has: its `parallel` plans lanes itself.
_OF_TORCH = {
    "compile_backend": "manyhands.parallel.torch_entry",
    "parallel": "manyhands.parallel.torch_entry",
    "whole_batch": "manyhands.training.torch.ranks.whole_batch",
}


def loaded_late(framework: str) -> dict[str, str]:
    """Each public name that is loaded on first use, and the module that has it."""
    late = {name: module.format(framework=framework) for module, names in _LATE.items() for name in names}
    return late | (_OF_TORCH if framework == "torch" else {})


def names(framework: str) -> list[str]:
    """The public names of a framework's module."""
    return sorted({"errors", *VERBS, *loaded_late(framework)})


def lazy(module: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of the module ``manyhands.<framework>``."""
    framework, here = module.rpartition(".")[2], vars(sys.modules[module])
    public = names(framework)
    late = dict.fromkeys(BOOK_NAMES, f"manyhands.book.{framework}") | loaded_late(framework)

    def load(name: str) -> Any:
        if name not in late:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
        value: Any = importlib.import_module(late[name])
        if name == "parallel" and framework != "torch":
            value = value.ParallelEntry(importlib.import_module(f"manyhands.backends.{framework}.parallel"))
        elif name != "loggers":  # itself a module
            value = getattr(value, name)
        here[name] = value
        return value

    return public, load, lambda: public
