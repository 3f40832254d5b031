"""What is in a value that is made of others: lists, tuples, dicts, sets, dataclasses, partial functions.

``contents(Batch(x, [y]))`` is ``[x, [y]]``; ``filled(Batch(future, 2), result_of)`` is a ``Batch`` with the future's
result.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def contents(value: Any) -> list[Any] | None:
    """The values that it is made of; None for one that is made of none."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if (names := _fields(value)) is not None:
        return [getattr(value, name) for name in names]
    return None


def filled(value: Any, given: Callable[[Any], Any]) -> Any:
    """With what ``given`` makes of each value inside; what has nothing to be replaced stays the object that it is."""
    if isinstance(value, dict):
        items = {key: filled(one, given) for key, one in value.items()}
        return items if any(items[key] is not one for key, one in value.items()) else value
    if isinstance(value, (list, tuple)):
        parts = [filled(one, given) for one in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if (names := _fields(value)) is not None:
        inner = {name: filled(getattr(value, name), given) for name in names}
        if all(one is getattr(value, name) for name, one in inner.items()):
            return value
        made = copy.copy(value)
        for name, one in inner.items():
            object.__setattr__(made, name, one)  # also where it is frozen
        return made
    return given(value)


def _fields(value: Any) -> list[str] | None:
    """The names of a dataclass's fields that are there."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
