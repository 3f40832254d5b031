"""Python attributes of a model besides parameters and buffers: counters, lists, moving averages.

On one device the training happens in the caller's own objects. On several devices it happens in worker processes, so
changed attributes are sent back with the weights: those of the first rank are written into the caller's modules, in
place if possible, because other objects may hold the same list. A checkpoint saves them too, as JSON and safetensors
(nothing is unpickled from a file); values other than numbers, texts, tensors and collections of them are not saved, and
a note says so. For example a model with ``self.calls = 0`` and ``self.losses = []``, both changed in every forward
pass::

    worker    {("", "calls"): 12, ("", "losses"): [0.7, ...]}   changed since the job began
    caller    model.calls = 12; model.losses[:] = [0.7, ...]

Attributes that are only read are looked at once, at the beginning.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from manyhands.backends.torch import compat
from manyhands.training.torch.fast.python_state import OF_EVERY_MODULE
from manyhands.training.torch.state import plain_json
from manyhands.training.torch.state.fingerprint import FUNCTIONS, digest
from manyhands.training.torch.workers import job_bytes

Place = tuple[str, str]  # the path of a module, and the name of an attribute
_LARGEST = 4 << 20  # bytes of JSON: larger things are data, not state
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class ModuleState:
    """The attributes of a model's modules, and which of them have changed since this was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._alive: list[object] = []
        self._before = self._looks(self._alive)

    def changed(self) -> dict[Place, Any]:
        """The attributes that have changed since the beginning, except those that had no digest then."""
        now = self._looks([])
        changed = {
            place
            for place, look in now.items()
            if place not in self._before or (self._before[place] is not None and look != self._before[place])
        }
        return {place: value for place, value in self._attributes() if place in changed}

    def _attributes(self) -> Iterator[tuple[Place, Any]]:
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name in OF_EVERY_MODULE or compat.is_mark(name):
                    continue
                if not isinstance(value, FUNCTIONS):
                    yield (path, name), value

    def _looks(self, alive: list[object]) -> dict[Place, Any]:
        names = Names(self._model)
        return {place: _look(value, names, alive) for place, value in self._attributes()}

    # The way back from a worker

    def final_state(self) -> tuple[dict[str, Any], list[str]]:
        """The changed attributes as bytes, and notes about those that cannot be sent."""
        names, notes = Names(self._model), []
        values: dict[Place, bytes] = {}
        for (path, name), value in self.changed().items():
            try:
                values[path, name] = names.dumps(value)
            except Exception:
                notes.append(_stays(self._model, (path, name), value, "its worker process: it cannot be pickled"))
        extra = {path: names.dumps(module.get_extra_state()) for path, module in _with_extra_state(self._model)}
        return {"attributes": values, "extra_state": extra}, notes

    # Checkpoints

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
        """The changed attributes as JSON, their tensors by name, and notes about those that are not saved."""
        tensors: dict[str, torch.Tensor] = {}
        attributes, extra, notes = [], {}, []
        for place, value in self.changed().items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                continue  # every step computes it again
            try:
                attributes.append([*place, _encoded(value, tensors)])
            except TypeError as error:
                notes.append(_stays(self._model, place, value, f"the job and is not in checkpoints: {error}"))
        for path, module in _with_extra_state(self._model):
            try:
                extra[path] = _encoded(module.get_extra_state(), tensors)
            except TypeError as error:
                notes.append(f"the extra state of {path or type(module).__name__} is not in checkpoints: {error}")
        return {"attributes": attributes, "extra_state": extra}, tensors, notes

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`save` returned."""
        device = next(self._model.parameters()).device
        modules = dict(self._model.named_modules())
        for path, name, value in saved["attributes"]:
            if path in modules:
                _put(modules[path], name, plain_json.decode(value, tensors, device))
        for path, value in saved["extra_state"].items():
            if path in modules:
                modules[path].set_extra_state(plain_json.decode(value, tensors, device))


def _look(value: Any, names: Names, alive: list[object]) -> Any:
    if isinstance(value, _SCALARS):
        return type(value), value if value == value else "nan"
    return digest(value, names.get_name, alive)


def restore_final_state(model: torch.nn.Module, final_state: Mapping[str, Any]) -> None:
    """Restore in the caller's model what :meth:`ModuleState.final_state` packed in a worker."""
    names, modules = Names(model), dict(model.named_modules())
    for (path, name), packed in final_state["attributes"].items():
        if path in modules:
            _put(modules[path], name, names.loads(packed))
    for path, packed in final_state["extra_state"].items():
        if path in modules:
            modules[path].set_extra_state(names.loads(packed))


def _encoded(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    encoded = plain_json.encode(value, tensors)
    if len(json.dumps(encoded)) > _LARGEST:
        raise TypeError(f"it is more than {_LARGEST >> 20} MiB of JSON")
    return encoded


def _with_extra_state(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.get_extra_state
    return [(path, module) for path, module in model.named_modules() if type(module).get_extra_state is not plain]


def _stays(model: torch.nn.Module, place: Place, value: Any, where: str) -> str:
    path, name = place
    owner = ".".join(filter(None, (type(model).__name__, path)))
    return f"{owner}.{name} (of type {type(value).__name__}) has changed and stays with {where}"


class Names:
    """The modules, parameters and buffers of a model by name: a copy of the model has others under the same names."""

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._by_name = {f"module {path}": module for path, module in model.named_modules()} | {
            f"tensor {name}": tensor for name, tensor in tensors
        }
        self._names = {id(value): name for name, value in self._by_name.items()}
        self.device = next(model.parameters()).device

    def get_name(self, value: object) -> str | None:
        return self._names.get(id(value))

    def dumps(self, value: Any) -> bytes:
        """A pickle of a value, in which the model's own objects are names, and tensors are on the host."""
        file, tensors = io.BytesIO(), list[torch.Tensor]()
        _Pickler(file, self, tensors).dump(value)
        return pickle.dumps((file.getvalue(), tensors))

    def loads(self, packed: bytes) -> Any:
        content, tensors = pickle.loads(packed)
        return _Unpickler(io.BytesIO(content), self, tensors).load()

    def find(self, name: str) -> Any:
        return self._by_name[name]


class _Pickler(job_bytes.Pickler):
    def __init__(self, file: Any, names: Names, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._known, self._tensors = names, tensors

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, (torch.Tensor, torch.nn.Module)):
            return None
        if (name := self._known.get_name(value)) is not None:
            return name
        if not isinstance(value, torch.Tensor):
            return None
        self._tensors.append(value.detach().to("cpu", copy=True))
        is_parameter = isinstance(value, torch.nn.Parameter)
        return len(self._tensors) - 1, value.device.type == "cpu", is_parameter, value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, names: Names, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._known, self._tensors = names, tensors

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, str):
            return self._known.find(name)
        number, on_host, is_parameter, requires_grad = name
        tensor = self._tensors[number] if on_host else self._tensors[number].to(self._known.device)
        return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


# Into the objects that are there


def _put(module: torch.nn.Module, name: str, value: Any) -> None:
    old = vars(module).get(name)
    if isinstance(old, torch.Tensor):
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(old.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for tensor in own):
            old = None  # it began as a view of a weight (PyTorch's older spectral_norm), which is not written to
    vars(module)[name] = _merged(old, value)


def _merged(old: Any, new: Any) -> Any:
    """The old object with the new value, if it can be written to, else the new object."""
    if type(old) is not type(new) or old is new:
        return new
    try:
        return _written(old, new)
    except Exception:  # it does not want to be written to
        return new


def _is_plain_class(kind: Any) -> bool:
    """Whether all that its objects hold is in their attributes."""
    return kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__


def _written(old: Any, new: Any) -> Any:
    if isinstance(old, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype or old.requires_grad:
            return new.to(old.device)
        old.copy_(new)
    elif isinstance(old, np.ndarray):
        if old.shape != new.shape or old.dtype != new.dtype:
            return new
        old[...] = new
    elif isinstance(old, list):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, deque) and old.maxlen == new.maxlen:
        old.clear()
        old.extend(new)
    elif hasattr(old, "__dict__") and _is_plain_class(type(old)):
        for name, value in vars(new).items():
            vars(old)[name] = _merged(vars(old).get(name), value)
    else:
        return new
    return old
