"""Where hooks and sinks meet: a hook announces a wait of the host, and every sink gets it.

A sink listens to the whole process (the command) or to one context (:func:`.guard.guard`): contexts are those of
:mod:`contextvars`, so neither another thread's nor another task's waits reach it. Hooks ask :data:`listening` first,
so that they cost next to nothing without a sink.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.audit import sites
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import Kind


@dataclass(frozen=True)
class WaitEvent:
    """One wait that is over."""

    stall: Stall
    begin: float  # of time.perf_counter
    seconds: float
    nbytes: int = 0


class Sink(Protocol):
    """A listener for waits."""

    def before(self, stall: Stall) -> None:
        """The host is about to wait; may raise to forbid it."""

    def after(self, event: WaitEvent) -> None:
        """The host has waited."""


listening = False
_everywhere: list[Sink] = []
_here: ContextVar[tuple[Sink, ...]] = ContextVar("manyhands_audit_sinks", default=())
_scopes = 0
_lock = threading.Lock()
_inside = threading.local()


def _update() -> None:
    global listening
    listening = bool(_everywhere) or _scopes > 0


@contextmanager
def everywhere(sink: Sink) -> Iterator[None]:
    """Let a sink hear of every wait of this process."""
    with _lock:
        _everywhere.append(sink)
        _update()
    try:
        yield
    finally:
        with _lock:
            _everywhere.remove(sink)
            _update()


@contextmanager
def here(sink: Sink) -> Iterator[None]:
    """Let a sink hear of the waits of this context: of this thread, or of this asyncio task and what it starts."""
    global _scopes
    with _lock:
        _scopes += 1
        _update()
    token = _here.set((*_here.get(), sink))
    try:
        yield
    finally:
        _here.reset(token)
        with _lock:
            _scopes -= 1
            _update()


def hooks_of(framework: str) -> Any:
    """The hooks of a framework, which is imported with them.

    ``install()`` wraps every call that waits, once; ``stand_in()`` lets the CPU stand in for a GPU from then on;
    ``used_device()`` says whether the program used either. ``steps`` tells listeners of every step.
    """
    return importlib.import_module(f"manyhands.audit.{framework}.hooks")


def sinks() -> tuple[Sink, ...]:
    """The sinks that get a wait now: none within a call that was already announced."""
    if getattr(_inside, "a_wait", False):
        return ()
    return (*_everywhere, *_here.get())


@contextmanager
def quiet() -> Iterator[None]:
    """Wait without anybody hearing of it: for the auditor's own measurements."""
    before = getattr(_inside, "a_wait", False)
    _inside.a_wait = True
    try:
        yield
    finally:
        _inside.a_wait = before


class Waiting:
    """The scope of one wait: announced, timed and reported.

    What waits inside (``print`` reads every number) is part of it. ``nbytes`` may be set until the end.
    """

    __slots__ = ("begin", "nbytes", "sinks", "stall")

    def __init__(self, kind: Kind, call: str, nbytes: int, framework: str = "torch") -> None:
        self.nbytes = nbytes
        self.sinks = sinks()
        site = sites.current(3) if self.sinks else None
        self.stall = None if site is None else Stall(kind, call, site, framework)
        self.begin = 0.0

    def __enter__(self) -> Waiting:
        if self.sinks:
            if self.stall is not None:
                for sink in self.sinks:
                    sink.before(self.stall)
            _inside.a_wait = True
            self.begin = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not self.sinks:
            return
        seconds = time.perf_counter() - self.begin
        _inside.a_wait = False
        if self.stall is not None:
            event = WaitEvent(self.stall, self.begin, seconds, self.nbytes)
            for sink in self.sinks:
                sink.after(event)
