"""How a write that no task has declared is noticed: what a task reaches is compared, before it and after it.

The framework's arrays and modules are compared by what the framework says of them (``version_of``), NumPy arrays and
buffers by their content, lists, dicts, sets, deques and the user's objects by the objects that they hold, variables by
the object that they name. A task that reaches a lock orders what it does to Python objects itself: of such a task only
arrays are compared.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Set
from typing import Any

from manyhands.engine.reached import BUFFERS, Found, Objects, attributes
from manyhands.spans import Held, content, share, span_of_array, span_of_buffer

_WHOLE, _BLOCKS = 1 << 20, 256  # bytes of an array that are compared as they are; blocks of a larger one


class Watch:
    """What was found before a task began, except what it has declared to write."""

    __slots__ = ("_held", "_variables", "_version_of", "_versions")

    def __init__(self, objects: Objects, found: Found, written: Set[Hashable]) -> None:
        self._version_of = objects.version_of
        watched, holders, variables = found.objects, found.holders, found.variables
        if found.locks:
            holders, variables = [], []
        if written:
            watched = [one for one in watched if not share(_memories_of(one, objects), written)]
            holders = [one for one in holders if id(one) not in written]
            variables = [one for one in variables if one.key() not in written]
        self._versions = [(one, version) for one in watched if (version := self._version(one)) is not None]
        self._held = [(one, _held_by(one)) for one in holders]
        self._variables = variables

    def changed(self) -> Any:
        """The first thing that is not as it was, or None."""
        for one, version in self._versions:
            if self._version(one) != version:
                return one
        for one, held in self._held:
            if _held_by(one) != held:
                return one
        for variable in self._variables:
            if not variable.is_bound():
                return variable
        return None

    def _version(self, one: Any) -> Any:
        if (span := _span_of(one)) is not None:
            return span, content(span, _WHOLE, _BLOCKS)
        return self._version_of(one) if self._version_of else None


def _memories_of(one: Any, objects: Objects) -> list[Hashable]:
    span = _span_of(one)
    return [objects.memory_of(one) if span is None else span]


def _span_of(one: Any) -> Any:
    """Where a NumPy array or a buffer lies; None for anything else, and for what nobody can write to."""
    if isinstance(one, BUFFERS):
        return span_of_buffer(one)
    numpy: Any = sys.modules.get("numpy")
    return span_of_array(one) if numpy is not None and isinstance(one, numpy.ndarray) else None


def _held_by(one: Any) -> Held:
    """What a container or an object of the user's holds."""
    if isinstance(one, dict):
        return Held([*one, *one.values(), *attributes(one)])
    return Held([*one, *attributes(one)] if isinstance(one, (list, set, deque)) else attributes(one))


def in_words(changed: Any) -> str:
    """What has changed, for an error."""
    shape = getattr(changed, "shape", None)
    return f"a {type(changed).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
