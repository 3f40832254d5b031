"""What the four doors share: the list of their names, and where each is loaded from.

A door binds the verbs of placement when it is imported. Everything else (training, ``parallel``, tasks) is loaded on
first use, so that a program which only moves tensors does not wait for a trainer. A type checker does not follow a
module's ``__getattr__``, so each door imports the same names again under ``TYPE_CHECKING``
(:mod:`manyhands.door_names` has the names that are the same objects in all doors), and ``tests/test_structure.py``
compares them with this list.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from manyhands.placement.verbs import Verbs

VERBS = tuple(name for name in vars(Verbs) if not name.startswith("_"))

# The module of each name that is loaded on first use.
LOADED_LATE: Mapping[str, str] = MappingProxyType(
    {
        "Accumulator": "manyhands.book.vocabulary",
        "Animator": "manyhands.book.vocabulary",
        "Benchmark": "manyhands.book.vocabulary",
        "BestCheckpoint": "manyhands.training.callbacks.monitored",
        "CSVLogger": "manyhands.training.callbacks.logger",
        "Callback": "manyhands.training.callbacks.callback",
        "Checkpoints": "manyhands.training.options",
        "DataModule": "manyhands.book.{framework}",
        "EMA": "manyhands.training.callbacks.weights",
        "EarlyStopping": "manyhands.training.callbacks.monitored",
        "Future": "manyhands.tasks.scope",
        "HyperParameters": "manyhands.book.vocabulary",
        "LearningRateMonitor": "manyhands.training.callbacks.weights",
        "Limits": "manyhands.training.options",
        "Logger": "manyhands.training.callbacks.logger",
        "LossSum": "manyhands.training.loss.own_step",
        "MLflowLogger": "manyhands.training.callbacks.services",
        "Module": "manyhands.book.{framework}",
        "Parallel": "manyhands.parallel.handed_over",
        "Progress": "manyhands.training.callbacks.progress",
        "PerEpoch": "manyhands.training.schedules",
        "PerStep": "manyhands.training.schedules",
        "Residual": "manyhands.book.{framework}",
        "Result": "manyhands.training.result",
        "Step": "manyhands.training.options",
        "Stopped": "manyhands.training.stopping",
        "TensorBoardLogger": "manyhands.training.callbacks.services",
        "Timer": "manyhands.book.vocabulary",
        "Trainer": "manyhands.book.{framework}",
        "WandbLogger": "manyhands.training.callbacks.services",
        "Workers": "manyhands.training.options",
        "accuracy": "manyhands.book.{framework}",
        "add_to_class": "manyhands.book.vocabulary",
        "assert_no_stalls": "manyhands.audit.guard",
        "by_step": "manyhands.training.schedules",
        "evaluate_accuracy_gpu": "manyhands.book.{framework}",
        "evaluate_accuracy_gpus": "manyhands.book.{framework}",
        "forecast": "manyhands.forecast.measured",
        "guard": "manyhands.audit.guard",
        "lenet": "manyhands.book.{framework}",
        "load_data_fashion_mnist": "manyhands.book.{framework}",
        "load_model": "manyhands.book.{framework}",
        "load_weights": "manyhands.book.{framework}",
        "one_cycle": "manyhands.training.schedules",
        "parallel": "manyhands.parallel.handed_over",
        "resnet18": "manyhands.book.{framework}",
        "task": "manyhands.tasks.scope",
        "train": "manyhands.book.{framework}",
    }
)
# Names that PyTorch's door loads from another module, or that only it has: its `parallel` plans lanes itself.
OF_TORCH: Mapping[str, str] = MappingProxyType(
    {
        "Parallel": "manyhands.parallel.function",
        "compile_backend": "manyhands.parallel.torch_entry",
        "parallel": "manyhands.parallel.torch_entry",
        "whole_batch": "manyhands.training.torch.ranks.whole_batch",
    }
)


def names(framework: str) -> list[str]:
    """The public names of a door."""
    return sorted({"Arrival", "errors", *VERBS, *LOADED_LATE, *(OF_TORCH if framework == "torch" else ())})


def lazy(door: str, verbs: Verbs[Any, Any, Any]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a door, a module of the name ``manyhands.<framework>``."""
    framework, here = door.rpartition(".")[2], vars(sys.modules[door])
    public = names(framework)
    late = {**LOADED_LATE, **(OF_TORCH if framework == "torch" else {})}

    def load(name: str) -> Any:
        if name not in late:
            raise AttributeError(f"module {door!r} has no attribute {name!r}", name=name, obj=sys.modules[door])
        module = importlib.import_module(late[name].format(framework=framework))
        if name == "Benchmark":
            waits = {"_synchronize": staticmethod(verbs.synchronize), "__module__": door}
            value = type(name, (module.Benchmark,), {**waits, "__doc__": module.Benchmark.__doc__})
        elif name == "parallel" and framework != "torch":
            value = module.ParallelEntry(importlib.import_module(f"manyhands.backends.{framework}.handover"))
        else:
            value = getattr(module, name)
        here[name] = value
        return value

    return public, load, lambda: sorted({*here, *public})
