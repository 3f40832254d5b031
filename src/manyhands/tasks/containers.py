"""The contents of containers: lists, tuples, dicts, sets, deques, ChainMap, UserDict, dataclasses, partial functions.

``contents(Batch(x, [y]))`` is ``[x, [y]]``; ``filled(Batch(future, 2), result_of)`` is a ``Batch`` with the future's
result. A subclass (``OrderedDict``, ``defaultdict``, a named tuple, a user's class) is kept.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import ChainMap, UserDict, deque
from collections.abc import Callable
from typing import Any


def contents(value: object) -> list[object] | None:
    """The values inside a container; None if the value is not a container."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, ChainMap):
        return list(value.maps)
    if isinstance(value, UserDict):  # as the batches of tokenizers are
        return [value.data]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if (names := _fields(value)) is not None:
        return [getattr(value, name) for name in names]
    return None


def filled(value: object, replacement: Callable[[object], object]) -> object:
    """The value with a replacement for each value inside; the same object where nothing is replaced."""
    inside = contents(value)
    if inside is None:
        return replacement(value)
    parts = [filled(part, replacement) for part in inside]
    if all(new is old for new, old in zip(parts, inside, strict=True)):
        return value
    return _rebuilt(value, parts)


def _rebuilt(value: object, parts: list[object]) -> object:
    """A value like this one, made of these parts."""
    if isinstance(value, tuple):
        rebuilt: Any = tuple.__new__(type(value), parts)
        if attributes := getattr(value, "__dict__", None):
            vars(rebuilt).update(attributes)
        return rebuilt
    if isinstance(value, frozenset):
        return type(value)(parts)
    if isinstance(value, functools.partial):
        function: Any
        function, *rest = parts
        count = len(value.args)
        return type(value)(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))
    rebuilt = copy.copy(value)
    if isinstance(value, dict):
        dict.update(rebuilt, zip(value, parts, strict=True))
    elif isinstance(value, (list, deque)):
        for number, part in enumerate(parts):
            rebuilt[number] = part
    elif isinstance(value, set):
        rebuilt.clear()
        rebuilt.update(parts)
    elif isinstance(value, ChainMap):
        rebuilt.maps = parts
    elif isinstance(value, UserDict):
        (rebuilt.data,) = parts
    else:
        for name, part in zip(_fields(value) or (), parts, strict=True):
            object.__setattr__(rebuilt, name, part)  # also where it is frozen
    return rebuilt


def _fields(value: object) -> list[str] | None:
    """The names of a dataclass's fields that are there."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
