"""Results that are dataclasses, or shapes, made anew at every call.

PyTorch's trees end at a dataclass, and a ``torch.Size`` comes out of them as a tuple. So where a function gives one, it
is taken for the time of tracing as its parts, which are a branch of the tree; what is put together from that branch is
a dataclass again, made without ``__init__``, so that a ``__post_init__`` does not run twice.

``Pair(x + 1, 2)`` becomes ``Parts(Pair, ("first", "second"), (x + 1, 2))``; put together from other values, a ``Pair``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from manyhands.backends.torch.compat import SUPPORTED_NODES, register_pytree_node, tree_map


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an object is put together from."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


def opened(result: Any) -> Any:
    """The result with such objects taken apart; the rest of the tree is a copy."""
    return tree_map(_taken_apart, result, is_leaf=_can_be_opened)


def _can_be_opened(value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, Parts)) or type(value) in SUPPORTED_NODES:
        return False
    names = {field.name for field in dataclasses.fields(value)}
    return set(getattr(value, "__dict__", names)) == names and all(hasattr(value, name) for name in names)


def _taken_apart(value: Any) -> Any:
    if not _can_be_opened(value):
        return value
    if isinstance(value, torch.Size):
        return Parts(torch.Size, (), tuple(value))
    names = tuple(field.name for field in dataclasses.fields(value))
    return Parts(type(value), names, tuple(opened(getattr(value, name)) for name in names))


def _put_together(values: Iterable[Any], known: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = known
    if kind is torch.Size:
        return torch.Size(values)
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also where it is frozen
    return made


register_pytree_node(Parts, lambda one: (list(one.values), (one.kind, one.names)), _put_together)
