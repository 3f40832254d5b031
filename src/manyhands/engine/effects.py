"""Effects of a call that are seen nowhere but where they happen: what it prints, files it opens, random numbers.

While a call is watched, ``print``, ``open`` and ``input`` of Python are replaced by functions that take a note and do
the same; the states of Python's and NumPy's random numbers are compared. Not seen: the clock, the network, logging.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

_WATCHED = {"print": "prints", "open": "opens a file", "input": "asks the user"}


class Effects:
    """``with Effects() as effects:`` afterwards ``effects.found`` says what this thread did, or is None."""

    _watching: ClassVar[list[Effects]] = []
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.found: str | None = None

    def __enter__(self) -> Effects:
        self._thread = threading.get_ident()
        self._random = _random_states()
        with self._lock:  # several threads may plan at once: the first replaces Python's functions
            if not self._watching:
                for name, what in _WATCHED.items():
                    setattr(builtins, name, _noting(getattr(builtins, name), what))
            self._watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._watching.remove(self)
            if not self._watching:
                for name in _WATCHED:
                    setattr(builtins, name, getattr(builtins, name).__wrapped__)
        if self.found is None and _random_states() != self._random:
            self.found = "draws random numbers of Python or NumPy"

    @classmethod
    def note(cls, what: str) -> None:
        for one in cls._watching:
            if one._thread == threading.get_ident():
                one.found = what


def _noting(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*arguments: Any, **keywords: Any) -> Any:
        Effects.note(f"{what} ({function.__name__})")
        return function(*arguments, **keywords)

    return noting


def _random_states() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, key, *rest = numpy.random.get_state()
    return random.getstate(), kind, key.tobytes(), *rest
