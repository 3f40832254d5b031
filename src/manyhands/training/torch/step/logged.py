"""``self.log(name, value)`` in ``training_step`` and ``validation_step``: the mean over the samples of all devices.

The method collects the values of a pass; after it :class:`.running_sums.RunningSums` adds them up on the device, each
weighted by the samples of the batch. So nothing waits, and a captured step adds in every replay. Rows, loggers and
callbacks have the mean by its name. Options of Lightning's ``self.log`` may stay; two of them count here:
``batch_size``, the weight of the value, and ``reduce_fx``, which is a mean.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadSettings, type_in_words

MOST = 32  # names of a job


@dataclass
class LoggedValue:
    """One value of a pass; ``weight``: None is the samples of its batch."""

    name: str
    value: torch.Tensor | float
    weight: float | None


_values: list[LoggedValue] | None = None  # of the pass that is running
_METHODS = ("log", "log_dict")
LIGHTNING = ("lightning.", "pytorch_lightning.")


def log(name: str, value: Any, *_: Any, batch_size: float | None = None, reduce_fx: Any = "mean", **__: Any) -> None:
    """Log a number of this batch: its mean over all samples is in rows, loggers and callbacks."""
    if _values is None:
        return
    if reduce_fx not in ("mean", torch.mean):
        raise BadSettings(f"self.log({name!r}, reduce_fx={reduce_fx!r}): logged values are means over samples")
    if not isinstance(value, (torch.Tensor, Real)):
        raise BadSettings(
            f"self.log({name!r}, ...) got {type_in_words(value)}: give one number of this batch, as a tensor. For a "
            "metric of torchmetrics that is metric(output, target); Trainer(metrics=...) computes it over an epoch"
        )
    value = value.detach() if isinstance(value, torch.Tensor) else float(value)  # here, in the line that reads it
    _values.append(LoggedValue(name, value, batch_size))


def log_dict(dictionary: Mapping[str, Any], *_: Any, **options: Any) -> None:
    """Log several numbers of this batch by name."""
    for name, value in dictionary.items():
        log(name, value, **options)


@contextlib.contextmanager
def collect() -> Iterator[list[LoggedValue]]:
    """Collects what is logged within it."""
    global _values
    before, _values = _values, []
    try:
        yield _values
    finally:
        _values = before


def loss_of_pass() -> torch.Tensor | None:
    """The loss of a validation step that returns nothing: what it has logged as ``val_loss`` (else NaN), if it logs."""
    if not _values:
        return None
    values = {each.name: each.value for each in _values}
    loss = values.get("val_loss", math.nan)
    device = next((value.device for value in values.values() if isinstance(value, torch.Tensor)), None)
    return loss if isinstance(loss, torch.Tensor) else torch.full((), loss, device=device)


@contextlib.contextmanager
def attach(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model has ``log`` and ``log_dict``, unless its class has its own, other than Lightning's."""
    attributes = vars(compat.without_compile(model))  # of a compiled model those of the model itself
    methods = {name: method for name, method in zip(_METHODS, (log, log_dict), strict=True) if _is_free(model, name)}
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            attributes.pop(name, None)
        attributes.update(before)


def may_log(model: Any) -> bool:
    """Whether a method of the model's own class speaks of one of these methods."""
    kinds = type(compat.without_compile(model)).__mro__
    functions = [value for kind in kinds for value in vars(kind).values() if hasattr(value, "__code__")]
    own = [function for function in functions if not function.__module__.startswith(("torch.", *LIGHTNING))]
    return any(set(_METHODS) & set(function.__code__.co_names) for function in own)


def _is_free(model: torch.nn.Module, name: str) -> bool:
    own = getattr(model, name, None)
    return own is None or str(getattr(own, "__module__", "")).startswith(LIGHTNING)
