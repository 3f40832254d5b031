"""Places where a function may leave new objects: globals, classes, closures, slots, tensors, caches.

What a function reads outside itself is recorded as facts (:mod:`.state`). What it creates there is not among them:
``global last; last = x.sum()`` where there was no ``last``, ``w.buffer = x * 2`` where the tensor had no such
attribute, a ``functools.lru_cache`` that keeps a result. While a function is traced, all of these would be fake
tensors, and stay. So each such place is copied before tracing, compared after it, and put back.
"""

from __future__ import annotations

import functools
from typing import Any

_NOTHING = object()
_Cache = type(functools.lru_cache(lambda: None))


def is_cache(value: object) -> bool:
    """Whether it is a function that remembers its results (``functools.lru_cache``)."""
    return isinstance(value, _Cache)


class Namespaces:
    """Copies of places, and what has changed in them."""

    def __init__(self) -> None:
        self._spaces: dict[int, tuple[str, Any, dict[str, Any]]] = {}
        self._empty: list[tuple[str, Any, str]] = []  # cells and slots that hold nothing
        self._caches: list[tuple[str, Any, int]] = []

    def space(self, holder: Any, name: str) -> None:
        """A namespace: a dict, or a class."""
        if id(holder) not in self._spaces:
            self._spaces[id(holder)] = (name, holder, _content(holder))

    def empty(self, holder: Any, word: str, name: str) -> None:
        """A cell or an object that has no such attribute yet."""
        self._empty.append((name, holder, word))

    def cache(self, cached: Any, name: str) -> None:
        self._caches.append((name, cached, cached.cache_info().misses))

    def changed(self) -> str | None:
        """The name of the first thing that was created, replaced or removed."""
        for name, holder, before in self._spaces.values():
            if differing := _differing(holder, before):
                return f"{name}.{differing[0]}" if name else differing[0]
        return next((name for name, holder, word in self._empty if _has(holder, word)), None)

    def filled(self) -> str | None:
        """The name of the first cache that has stored a new result."""
        return next((name for name, cached, misses in self._caches if cached.cache_info().misses != misses), None)

    def put_back(self) -> None:
        for _, holder, before in self._spaces.values():
            for word in _differing(holder, before):
                if isinstance(holder, type):
                    setattr(holder, word, before[word]) if word in before else delattr(holder, word)
                elif word in before:
                    holder[word] = before[word]
                else:
                    del holder[word]
        for _, holder, word in self._empty:
            if _has(holder, word):
                delattr(holder, word)
        for _, cached, misses in self._caches:
            if cached.cache_info().misses != misses:
                cached.cache_clear()

    def forget(self) -> None:
        """Drop the copies: they would keep alive what users delete."""
        for place in (self._spaces, self._empty, self._caches):
            place.clear()


def _content(holder: Any) -> dict[str, Any]:
    return dict(vars(holder) if isinstance(holder, type) else holder)


def _differing(holder: Any, before: dict[str, Any]) -> list[str]:
    """The names whose values have changed, without Python's own (``__warningregistry__``)."""
    now = _content(holder)
    words = [word for word in {**before, **now} if before.get(word, _NOTHING) is not now.get(word, _NOTHING)]
    return [word for word in words if not (isinstance(word, str) and word.startswith("__"))]


def _has(holder: Any, word: str) -> bool:
    try:
        getattr(holder, word)
    except (AttributeError, ValueError):  # of a slot; of a cell
        return False
    return True
