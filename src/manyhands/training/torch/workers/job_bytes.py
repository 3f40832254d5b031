"""A job as bytes, on its way to the worker processes.

Functions and classes of a notebook travel by value (cloudpickle). So do parametrised modules, which PyTorch refuses to
pickle: it gives each a class of its own, made at run time, in which the parametrised tensors are properties. What is
sent is the class that it was made of and the names of those tensors; the worker makes the class again.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

from manyhands.errors import NotSendable
from manyhands.training.torch.job import Job

ANSWER = b"answer "  # to the first rank: what callbacks say to an event of it; JSON follows
COME_HOME = b"come home"  # to a rank: end the job between two steps, and send the weights
STOP = b"stop after this step: "  # to the first rank, and the name of the signal that the caller got
WISH = b"callbacks stop: "  # to the first rank: callbacks stop the training without being asked; JSON follows


def pickled(job: Job) -> bytes:
    """A job as bytes; what cannot be sent is named."""
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
    """Functions and classes of a notebook by value, parametrised modules by what they are made of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module) and type(value).__module__ == parametrize.__name__:
            made_of = type(value).__base__
            if made_of is not None and parametrize.is_parametrized(value):
                names = list(value.parametrizations)  # type: ignore[arg-type]
                return _parametrised, (made_of, names), vars(value), None, None, _fill
        return super().reducer_override(value)


def _parametrised(made_of: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """A module of the class that PyTorch makes for parametrised tensors; what it holds comes later."""
    module = made_of.__new__(made_of)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _fill(module: torch.nn.Module, holds: dict[str, Any]) -> None:
    vars(module).update(holds)


def with_place(job_bytes: bytes, place: dict[str, Any]) -> bytes:
    """A pickle of (job, place) that reuses the job's own bytes: they are large and the same for all."""
    return bytes(cloudpickle.dumps(_Sealed(job_bytes, place)))


class _Sealed:
    def __init__(self, job_bytes: bytes, place: dict[str, Any]) -> None:
        self._parts = (job_bytes, place)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unsealed, self._parts


def _unsealed(job_bytes: bytes, place: dict[str, Any]) -> tuple[Job, dict[str, Any]]:
    # Modules beside the caller's script are found by the caller's path only.
    sys.path[:] = place["path"]
    return cloudpickle.loads(job_bytes), place
