"""A job as bytes, on its way to the worker processes.

Functions and classes of a notebook travel by value (cloudpickle). So do parametrised modules, which PyTorch refuses to
pickle: it creates a class for each at run time, in which the parametrised tensors are properties. The bytes hold the
base class and the names of those tensors; the worker creates the class again. A module of Python's that is an object of
its own class, as ``torch.backends.cudnn``, is imported by the worker.
"""

from __future__ import annotations

import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

from manyhands.backends.torch import compat
from manyhands.errors import NotSendable
from manyhands.training.torch.job import Job

ANSWER = b"answer "  # to the first rank: what callbacks say to an event of it; JSON follows
STOP_JOB = b"stop"  # to a rank: end the job between two steps, and send the weights
STOP = b"stop after this step: "  # to the first rank; the name of the caller's signal follows
WISH = b"callbacks stop: "  # to the first rank: callbacks stop the training without being asked; JSON follows


def pickled(job: Job) -> bytes:
    """A job as bytes; the error names what cannot be sent."""
    try:
        return dumps(job)
    except Exception as error:
        for name, part in vars(job).items():
            try:
                dumps(part)
            except Exception as reason:
                raise NotSendable(
                    f"the {name} of this job cannot be sent to its worker processes: {reason}. Make what it needs "
                    "inside of it (open files, locks, connections), or train on one device"
                ) from error
        raise


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes of a notebook by value, parametrised modules by their base class."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module) and type(value).__module__ == parametrize.__name__:
            base = type(value).__base__
            if base is not None and parametrize.is_parametrized(value):
                names = list(value.parametrizations)  # type: ignore[arg-type]
                return _parametrised, (base, names), vars(value), None, None, _fill
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)  # cloudpickle knows plain modules alone
        return super().reducer_override(value)


def _parametrised(base: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """An empty module of the class that PyTorch creates for parametrised tensors; :func:`_fill` gives it its state."""
    module = base.__new__(base)
    compat.parametrise(module, names)
    return module


def _fill(module: torch.nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
