"""What a model holds beside its tensors: the modes of its layers, plain attributes, and extra state.

The contract is PyTorch's: parameters, buffers and what ``get_extra_state`` returns are state. Numbers, strings and
flags among a module's attributes (the counter of an annealed temperature, say) go with them, so that a resumed job is
the same job: those that have changed since the job began are in checkpoints, and come back from worker processes. So
are the ``requires_grad`` of parameters. Other attributes are not state: lists, dicts, objects and plain tensors stay in
the process that changed them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands.backends.torch import compat
from manyhands.errors import type_in_words
from manyhands.training.torch.state import job_state

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))
_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


class ModuleState:
    """The plain attributes and the extra state of a model's modules, and which parameters are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before, self._trained = self._attributes(), self._flags()

    def _attributes(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): float(value) if isinstance(value, np.floating) else value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (*_PLAIN, np.float64) and name not in OF_EVERY_MODULE and not compat.is_mark(name)
        }

    def _flags(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}

    def save(self, *, whole: bool = False) -> tuple[dict[str, Any], bytes, list[str]]:
        """As JSON, with tensors beside it; and notes about extra state that cannot be saved.

        ``whole``: also what has not changed since this object was made.
        """
        tensors, extra, notes = dict[str, torch.Tensor](), dict[str, Any](), list[str]()
        for path, module in self._model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                continue
            try:
                extra[path] = encode(module.get_extra_state(), tensors)
            except TypeError as error:
                notes.append(f"get_extra_state of {path or type(module).__name__} is not saved: {error}")
        changed = [
            [*place, encode(value, tensors)]
            for place, value in self._attributes().items()
            if whole or place not in self._before or self._before[place] != value
        ]
        flags = {name: flag for name, flag in self._flags().items() if whole or self._trained.get(name) != flag}
        return {"attributes": changed, "extra_state": extra, "trained": flags}, job_state.pack(tensors), notes


def restore(model: nn.Module, saved: Mapping[str, Any], blob: bytes) -> None:
    """Give a model what :meth:`ModuleState.save` returned."""
    tensors, device, modules = job_state.unpack(blob), next(model.parameters()).device, dict(model.named_modules())
    for path, name, value in saved["attributes"]:
        if path in modules:
            modules[path].__dict__[name] = decode(value, tensors, device)
    for path, value in saved["extra_state"].items():
        if path in modules:
            modules[path].set_extra_state(decode(value, tensors, device))
    for name, flag in saved.get("trained", {}).items():
        model.get_parameter(name).requires_grad_(flag)


def encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON; its tensors are added to ``tensors``. A TypeError says what has no form in JSON.

    Numbers, strings and None are themselves. Everything else is an object with one entry, its kind::

        {"decay": 0.9, "seen": (1, 2)}   ->  {"dict": [["decay", 0.9], ["seen", {"tuple": [1, 2]}]]}
        tensor(...)                      ->  {"tensor": ["0", true]}      true: it was on the host
    """
    if type(value) in _PLAIN:
        return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
    for name, kind in _COLLECTIONS.items():
        if type(value) is kind:
            return {name: [encode(entry, tensors) for entry in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, tensors), encode(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        tensor, name = torch.as_tensor(value), str(len(tensors))
        tensors[name] = tensor
        return {"array": name} if isinstance(value, np.ndarray) else {"tensor": [name, tensor.device.type == "cpu"]}
    raise TypeError(f"{type_in_words(value)} has no form in JSON")


def decode(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """The value of :func:`encode`; tensors that were not on the host are put on ``device``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {decode(key, tensors, device): decode(entry, tensors, device) for key, entry in content}
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tensor":
        return tensors[content[0]] if content[1] else tensors[content[0]].to(device)
    return _COLLECTIONS[kind](decode(entry, tensors, device) for entry in content)


@contextlib.contextmanager
def modes_preserved(net: object) -> Iterator[None]:
    """Afterwards every layer is in the mode that it was in: a user may have frozen some."""
    modes = [(layer, layer.training) for layer in net.modules()] if isinstance(net, nn.Module) else []
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


@contextlib.contextmanager
def evaluation_mode(net: object) -> Iterator[None]:
    """Within it the net is in evaluation mode: no dropout, and no statistics of the batch."""
    with modes_preserved(net):
        if isinstance(net, nn.Module):
            net.eval()
        yield


@contextlib.contextmanager
def statistics_kept(net: nn.Module) -> Iterator[None]:
    """Within it the net trains, except that normalisation over a batch uses its running statistics and keeps them."""
    with modes_preserved(net):
        for layer in net.modules():
            if hasattr(layer, "track_running_stats"):
                layer.eval()
        yield
