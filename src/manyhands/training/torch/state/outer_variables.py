"""Variables outside a model that its code changes: globals, and what its functions have closed over.

In a worker process they are copies, and changes stay there. Digests before and after a job find the changed ones, so
that a note can name them. They cover the variables that the methods of the model's classes, the loss and the schedule
name, not attributes of imported modules.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from manyhands.training.torch.job import Job
from manyhands.training.torch.state.fingerprint import FUNCTIONS, digest
from manyhands.training.torch.state.module_state import Names

_LIBRARIES = ("torch", "manyhands", "numpy")


class Outside:
    """The variables that a job's functions name, as they are before it begins."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._alive: list[object] = []
        self._before = self._looks(self._alive)

    def notes(self) -> list[str]:
        """A note for each variable that has changed."""
        now = self._looks([])
        changed = [name for name, look in self._before.items() if look is not None and now.get(name) != look]
        return [
            f"{name} is a variable outside the model: its value has changed in the worker processes, and is unchanged "
            "here. Keep it as an attribute of the model, which is sent back"
            for name in changed
        ]

    def _looks(self, alive: list[object]) -> dict[str, bytes | None]:
        names, digests = Names(self._job.model), dict[str, bytes | None]()
        for function in _functions(self._job):
            for name, value in _variables(function):
                if (
                    not isinstance(value, FUNCTIONS)
                    and value is not self._job.model
                    and value is not self._job.optimizer
                    and name not in digests
                ):
                    digests[name] = digest(value, names.get_name, alive)
        return digests


def _functions(job: Job) -> Iterator[types.FunctionType]:
    """The functions of a job that are the user's own."""
    values = [getattr(job.objective, "loss", None), job.schedule]
    kinds = {type(module) for module in job.model.modules()} | {type(value) for value in values}
    for kind in kinds:
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] not in (*_LIBRARIES, "builtins", "functools"):
                values += vars(base).values()
    for value in values:
        while isinstance(value, functools.partial):
            value = value.func
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield function


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
