"""Side effects of a call: what it prints, the files it opens, the random numbers of Python and NumPy that it draws.

While a call is watched, ``print``, ``open``, ``input`` and the method that writes to a log are wrapped: they record the
effect and do the same. States of random numbers are compared. Not seen: the clock, the network, ``sys.stdout.write``.

A call that only traces the function must have no effects at all: ``Effects(refuse=True)`` raises :class:`CannotTrace`
instead of printing, and restores the states of random numbers. Effects of installed packages, as when a framework
imports a part of itself, are not refused. What a framework does for itself (JAX stores compiled programs in files, if
asked to) does not count as an effect of the call in either case.
"""

from __future__ import annotations

import builtins
import functools
import io
import logging
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import ClassVar

from manyhands.device import FRAMEWORKS
from manyhands.errors import CannotTrace
from manyhands.python_code.names import is_foreign

_WATCHED: tuple[tuple[object, str, str], ...] = (
    (builtins, "print", "prints"),
    (builtins, "open", "opens a file"),
    (io, "open", "opens a file"),  # pathlib's name for it
    (builtins, "input", "asks the user"),
    (logging.Logger, "handle", "logs"),
)
_GO_BETWEENS = ("logging", "pathlib")  # their effects count as their caller's


class Effects:
    """``with Effects() as effects:`` and then ``effects.seen``: what this thread did, or None."""

    _watching: ClassVar[list[Effects]] = []
    _lock = threading.Lock()

    def __init__(self, *, refuse: bool = False) -> None:
        self.seen: str | None = None
        self._refuse = refuse

    def __enter__(self) -> Effects:
        self._thread = threading.get_ident()
        self._random = _random_states()
        with self._lock:  # several threads may plan at once: the first replaces Python's functions
            if not self._watching:
                for owner, name, effect in _WATCHED:
                    setattr(owner, name, _noting(getattr(owner, name), effect))
            self._watching.append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        with self._lock:
            self._watching.remove(self)
            if not self._watching:
                for owner, name, _ in _WATCHED:
                    setattr(owner, name, getattr(owner, name).__wrapped__)
        if _random_states()[: len(self._random)] != self._random:  # NumPy may have been imported meanwhile
            self.seen = self.seen or "draws random numbers of Python or NumPy"
            if self._refuse:
                _set_random_states(*self._random)

    @classmethod
    def note(cls, effect: str, caller: ModuleType | None) -> None:
        for watching in cls._watching:
            if watching._thread != threading.get_ident() or (
                watching._refuse and caller is not None and is_foreign(caller)
            ):
                continue
            watching.seen = effect
            if watching._refuse:
                raise CannotTrace(f"it {effect}")


def _noting(function: Callable[..., object], effect: str) -> Callable[..., object]:
    @functools.wraps(function)
    def noting(*arguments: object, **keywords: object) -> object:
        frame: FrameType = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _GO_BETWEENS:
            frame = frame.f_back
        if not _by_a_framework(frame):
            Effects.note(f"{effect} ({function.__name__})", _module(frame))
        return function(*arguments, **keywords)

    return noting


def _module(frame: FrameType) -> ModuleType | None:
    return sys.modules.get(str(frame.f_globals.get("__name__")))


def _by_a_framework(frame: FrameType | None) -> bool:
    """Whether a framework is between this call and the innermost code of the user."""
    while frame is not None and (module := _module(frame)) is not None and is_foreign(module):
        if module.__name__.partition(".")[0] in FRAMEWORKS:
            return True
        frame = frame.f_back
    return False


def _random_states() -> tuple[tuple[object, ...], *tuple[object, ...]]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, key, *rest = numpy.random.get_state()
    return random.getstate(), kind, tuple(key.tolist()), *rest


def _set_random_states(python: tuple[object, ...], *numpys: object) -> None:
    random.setstate(python)
    if numpys:
        sys.modules["numpy"].random.set_state(numpys)
