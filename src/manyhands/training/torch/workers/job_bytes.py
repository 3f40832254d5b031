"""A job as bytes, on its way to the worker processes.

Functions and classes of a notebook travel by value (cloudpickle). So do parametrised modules, which PyTorch refuses to
pickle: it creates a class for each at run time, in which the parametrised tensors are properties. The bytes hold the
base class and the names of those tensors; the worker creates the class again. Hooks of optimizers, which PyTorch leaves
out, travel with them. A module of Python's that is an object of its own class, as
``torch.backends.cudnn``, is imported by the worker; what is from a module that the worker could not import, because the
caller loaded it by its path, travels by value.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

from manyhands.backends.torch import compat
from manyhands.errors import NotSendable
from manyhands.training.torch.job import Job


def to_bytes(job: Job) -> bytes:
    """A job as bytes; the error names what cannot be sent."""
    of_optimizers = compat.hooks_of_every_optimizer()
    if any(compat.HOOKS_OF_EVERY_MODULE) or of_optimizers.before or of_optimizers.after:
        raise NotSendable(
            "a hook was registered for every module or every optimizer, and worker processes do not have it: register "
            "it for this model (module.register_forward_hook) or this optimizer (optimizer.register_step_pre_hook)"
        )
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

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._by_value: dict[str, bool] = {}

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        finally:
            for name in [name for name, is_new in self._by_value.items() if is_new]:
                cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def _note_module(self, name: str) -> None:
        """Let cloudpickle send the definitions of a module by value, if the worker cannot import it."""
        module = sys.modules.get(name)
        if name not in self._by_value and module is not None:
            is_new = name not in cloudpickle.list_registry_pickle_by_value() and not _importable(module)
            self._by_value[name] = is_new
            if is_new:
                cloudpickle.register_pickle_by_value(module)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and isinstance(value.__module__, str):
            self._note_module(value.__module__)
        if isinstance(value, torch.nn.Module) and type(value).__module__ == parametrize.__name__:
            base = type(value).__base__
            if base is not None and parametrize.is_parametrized(value):
                names = list(value.parametrizations)  # type: ignore[arg-type]
                return _parametrise, (base, names), vars(value), None, None, _fill
        if isinstance(value, torch.optim.Optimizer) and any(compat.hooks_of(value).values()):
            reduced: Any = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return *reduced[:2], (reduced[2], compat.hooks_of(value)), None, None, _hook
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)  # cloudpickle knows plain modules alone
        return super().reducer_override(value)


def _importable(module: ModuleType) -> bool:
    """Whether another process with the same path would import this module by its name."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return True  # built in, compiled, or __main__: cloudpickle and Python know what to do
    above, _, _ = name.rpartition(".")
    if above and above not in sys.modules:
        return True
    where = getattr(sys.modules[above], "__path__", None) if above else None
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    specs = (find(name, where) for find in finders)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return False
    origin = spec.origin
    return origin is None or not os.path.isfile(origin) or os.path.samefile(origin, file)


def loads(data: bytes) -> Any:
    """The job of :func:`to_bytes`, in a worker."""
    job = cloudpickle.loads(data)
    if isinstance(getattr(job, "model", None), torch.nn.Module):
        _announce(job.model)
    return job


def _announce(model: torch.nn.Module) -> None:
    """Tell transformers which outputs its models can record.

    They say so themselves when they are made, once for each class, and this process has not made them. Without it a
    model that computes from its hidden states (Segformer) gets none.
    """
    for name in ("transformers.utils.output_capturing", "transformers.utils.generic"):
        registry = getattr(sys.modules.get(name), "_CAN_RECORD_REGISTRY", None)
        if isinstance(registry, dict):
            for part in model.modules():
                if hasattr(part, "_can_record_outputs"):  # recent versions take the model, older ones its class
                    registry[str(type(part)) if type(registry) is dict else part] = part._can_record_outputs


def _parametrise(base: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """An empty module of the class that PyTorch creates for parametrised tensors; :func:`_fill` gives it its state."""
    module = base.__new__(base)
    compat.parametrise(module, names)
    return module


def _hook(optimizer: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Give an optimizer its hooks, once it is there: a hook may hold what it is hooked to."""
    optimizer.__setstate__(state[0])
    compat.set_hooks(optimizer, state[1])


def _fill(module: torch.nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)
