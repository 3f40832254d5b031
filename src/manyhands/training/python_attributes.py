"""Python attributes that a model's code changes while it computes: counters, lists, moving averages.

How often Python code runs is not always once per step. JAX and TensorFlow run it only while they trace a step; MXNet
runs it once for each device's part of a batch; and the trial of a loss runs it before the first step. So the attributes
are looked at, and put back where the code ran for something else than the step of one device. For example a model with
``self.calls += 1`` in its forward pass, on three devices with MXNet::

    step begins   calls = 4
    device 0      4 -> 5     kept
    device 1      4 -> 5     discarded
    device 2      4 -> 5     discarded
    step ends     calls = 5

Looked at are numbers, texts and collections. Flags and other objects are left alone: they mostly say that something was
set up, which it then is.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")
Place = tuple[str, str]  # the path of a part of the model, and the name of an attribute
Values = dict[Place, tuple[Any, Any]]  # the object, and a copy of what it contains
_VALUES = (int, float, complex, str)
_COLLECTIONS = (list, dict, set, deque)


class Attributes:
    """The attributes of a model's parts, by their paths."""

    def __init__(
        self, parts: Iterable[tuple[str, object]], *, ignored: Container[str] = (), kinds: tuple[type, ...] = ()
    ) -> None:
        """``ignored``: names that the framework uses; ``kinds``: types that count besides Python's own."""
        self._parts: list[tuple[str, dict[str, Any]]] = [(path, vars(part)) for path, part in parts]
        self._ignored, self._kinds = ignored, (*_VALUES, *_COLLECTIONS, *kinds)
        self._first = self.take()

    def take(self) -> Values:
        """The values of this moment."""
        return {
            (path, name): (value, _contents(value))
            for path, attributes in self._parts
            for name, value in attributes.items()
            if name not in self._ignored and isinstance(value, self._kinds) and not isinstance(value, bool)
        }

    def put(self, values: Values | None = None, *, keep_new: bool = False) -> None:
        """Put back values that were taken; by default those of the beginning.

        ``keep_new``: attributes that were not there stay. They may be what a layer has found out about its inputs.
        """
        values, now = self._first if values is None else values, self.take()
        parts = dict(self._parts)
        for path, name in () if keep_new else now.keys() - values.keys():
            del parts[path][name]
        for place, (value, contents) in values.items():
            if place not in now or now[place][0] is not value or not _same((value, contents), now[place]):
                _fill(value, contents)
                parts[place[0]][place[1]] = value

    def of_first(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run all of them, each with the current attributes; keep those that the first leaves behind."""
        before = self.take() if len(works) > 1 else {}
        results: list[Result] = []
        after = before
        for work in works:
            if results:
                self.put(before)
            results.append(work())
            if len(results) == 1 < len(works):
                after = self.take()
        if len(works) > 1:
            self.put(after)
        return results

    def saved(self) -> tuple[list[list[Any]], list[str]]:
        """The changed attributes as JSON, and the names of those that JSON cannot hold."""
        values, others = [], []
        for (path, name), value in self.changed().items():
            try:
                json.dumps(value, allow_nan=False)
                values.append([path, name, value])
            except (TypeError, ValueError):
                others.append(f"{path}.{name}")
        return values, others

    def restore(self, saved: Iterable[Sequence[Any]]) -> None:
        """Give attributes the values of a checkpoint; a collection stays the object that it is."""
        parts = dict(self._parts)
        for path, name, value in saved:
            if path not in parts:
                continue
            old = parts[path].get(name)
            if isinstance(old, (list, dict)) and type_of(old) is type(value):
                _fill(old, value)
            else:
                parts[path][name] = value

    def rewritten(self) -> list[str]:
        """The names of attributes that existed at the beginning and have another value now."""
        return [".".join(place) for place in self.changed() if place in self._first]

    def changed(self) -> dict[Place, Any]:
        """The attributes whose value differs from that at the beginning."""
        return {
            place: value
            for place, (value, contents) in self.take().items()
            if place not in self._first or not _same(self._first[place], (value, contents))
        }


def notes(names: Iterable[str], framework: str, advice: str) -> list[str]:
    """The notes for a compiled step whose Python code changes attributes."""
    if not (listed := ", ".join(sorted(names))):
        return []
    return [
        f"the model's Python code changes {listed}, which stays as it was: {framework} runs that code only while it "
        f"compiles a step, not in every step. {advice}"
    ]


def _contents(value: Any) -> Any:
    return type_of(value)(value) if isinstance(value, _COLLECTIONS) else None


def type_of(value: Any) -> Any:
    """The plain kind of a collection: frameworks have their own subclasses of lists and dicts."""
    return next(kind for kind in _COLLECTIONS if isinstance(value, kind))


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if before[0] is now[0] and before[1] is None:
        return True
    if isinstance(before[0], _VALUES):
        return type(before[0]) is type(now[0]) and (before[0] == now[0] or before[0] != before[0] != now[0])
    if before[1] is None or now[1] is None or len(before[1]) != len(now[1]):
        return False
    ordered = (before[1].items(), now[1].items()) if isinstance(before[1], dict) else (before[1], now[1])
    if isinstance(before[1], set):
        return bool(before[1] == now[1])
    # By identity first: arrays are not compared.
    return all(a is b or _equal(a, b) for a, b in zip(*ordered, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(x is y or _equal(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, _VALUES) and isinstance(b, _VALUES) and bool(a == b)


def _fill(value: Any, contents: Any) -> None:
    if isinstance(value, list):
        value[:] = contents
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(contents)
    elif isinstance(value, deque):
        value.clear()
        value.extend(contents)
