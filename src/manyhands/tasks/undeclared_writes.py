"""Detects writes that a task has not declared: what the task reaches is compared before it runs and after it.

The framework's arrays and modules are compared by what the framework says of them (``version_of``), NumPy arrays and
buffers by their content, lists, dicts, sets, deques and the user's objects by the objects that they hold, variables by
the object that they name. A task that reaches a lock orders what it does to Python objects itself: of such a task only
arrays are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Set

from manyhands.addresses import Held, Span, content, share, span_of_array, span_of_buffer
from manyhands.tasks.reachable import BUFFERS, Objects, Reached, attributes

_WHOLE, _BLOCKS = 1 << 20, 256  # arrays up to this size are compared whole, larger ones in so many blocks


class Watch:
    """The state of what a task reaches before it starts, except what it declares to write."""

    __slots__ = ("_arrays", "_held", "_variables", "_version_of", "_versions", "_words")

    def __init__(self, objects: Objects, reached: Reached, written: Set[Hashable]) -> None:
        arrays, watched, holders, variables = reached.arrays, reached.objects, reached.holders, reached.variables
        if reached.locks:
            holders, variables = [], []
        if written:
            arrays = [array for array in arrays if not share([_span_of(array) or id(array)], written)]
            watched = [value for value in watched if not share([objects.hooks.memory_of(value)], written)]
            holders = [holder for holder in holders if id(holder) not in written]
            variables = [variable for variable in variables if variable.key() not in written]
        self._version_of = version_of = objects.hooks.version_of if watched else None
        self._versions = [(value, version_of(value)) for value in watched] if version_of else ()
        self._arrays = [(array, _content_of(array)) for array in arrays] if arrays else ()
        self._words = reached.words
        self._held = [(holder, _held_by(holder, self._words)) for holder in holders] if holders else ()
        self._variables = variables

    def changed(self) -> object:
        """The first object that has changed, or None."""
        if version_of := self._version_of:
            for value, version in self._versions:
                if version is not None and version_of(value) != version:
                    return value
        for value, content_before in self._arrays:
            if _content_of(value) != content_before:
                return value
        for value, held in self._held:
            if _held_by(value, self._words) != held:
                return value
        for variable in self._variables:
            if not variable.is_bound():
                return variable
        return None


def _content_of(array: object) -> object:
    """The address and content of a NumPy array or a buffer; None if it cannot be written to."""
    span = _span_of(array)
    return None if span is None else (span, content(span, _WHOLE, _BLOCKS))


def _span_of(array: object) -> Span | None:
    return span_of_buffer(array) if isinstance(array, BUFFERS) else span_of_array(array)


def _held_by(holder: object, words: Set[str] | None) -> Held:
    """The objects in a container, or in the attributes of a user's object that have these names."""
    if isinstance(holder, dict):
        return Held([*holder, *holder.values(), *(value for _, value in attributes(holder))])
    if isinstance(holder, (list, set, deque)):
        return Held([*holder, *(value for _, value in attributes(holder))])
    return Held([part for both in attributes(holder) if words is None or both[0] in words for part in both])


def in_words(changed: object) -> str:
    """What has changed, for an error."""
    shape = getattr(changed, "shape", None)
    name = type(changed).__name__
    article = "an" if name[0] in "aeioAEIO" or name in ("NDArray", "ndarray") else "a"
    return f"{article} {name}" + ("" if shape is None else f" of shape {tuple(shape)}")
