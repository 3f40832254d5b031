"""A batch as a model takes it: a tuple (inputs..., target), or a dict with the target among its entries.

The entries of a dict go to the model by name where its ``__call__`` has arguments of these names. Otherwise a single
entry is its one argument, and several are one dict::

    {"image": X, "label": y}                    __call__(self, x)                   model(X)
    {"tokens": X, "mask": M, "labels": y}       __call__(self, tokens, mask)        model(tokens=X, mask=M)
    {"left": A, "right": B, "target": y}        __call__(self, pair)                model({"left": A, "right": B})
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax

from manyhands.errors import BadBatch
from manyhands.training import refusals
from manyhands.training.data.roles import LABELS

Batch = tuple[Any, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position, and by name


def is_dict(batch: Batch) -> bool:
    """Whether the whole batch is a dict; sources hold it as a tuple of one."""
    return len(batch) == 1 and isinstance(batch[0], Mapping)


def as_given(batch: Batch) -> Any:
    """The batch as the user's data have it."""
    return batch[0] if is_dict(batch) else batch


def rows(batch: Batch) -> int:
    return len(jax.tree.leaves(batch)[0])


def target_of(batch: Batch) -> Any:
    """The target; None where there is none."""
    if is_dict(batch):
        return next((batch[0][name] for name in LABELS if name in batch[0]), None)
    return batch[-1] if len(batch) > 1 else None


def needed_target(batch: Batch) -> Any:
    target = target_of(batch)
    if target is not None:
        return target
    if not is_dict(batch):
        raise refusals.no_target(batch)
    raise BadBatch(
        f"a batch is a dict of {', '.join(map(repr, batch[0]))}, and none of these is the target: call it 'label' (or "
        f"{', '.join(map(repr, (LABELS[0], *LABELS[2:])))}), or give the model a training_step(batch)"
    )


def arguments_of(model: Any, batch: Batch) -> Arguments:
    """What the model is called with for a batch with a target; of a dict also for one without."""
    return _named(model, batch[0]) if is_dict(batch) else (batch[:-1], {})


def _named(model: Any, entries: Mapping[str, Any]) -> Arguments:
    inputs = {name: value for name, value in entries.items() if name not in LABELS}
    call = type(getattr(model, "to_nnx__module", model)).__call__
    parameters = inspect.signature(call).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = {name: value for name, value in inputs.items() if name in parameters}
    if by_name:
        return (), inputs if takes_any else by_name
    return (next(iter(inputs.values())) if len(inputs) == 1 else inputs,), {}
