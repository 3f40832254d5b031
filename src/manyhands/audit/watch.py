"""Where hooks and sinks meet: a hook announces a wait of the host, and every sink gets it.

A sink listens to the whole process (the command) or to one context (:func:`.guard.guard`): contexts are those of
:mod:`contextvars`, so neither another thread's nor another task's waits reach it. Hooks ask :data:`listening` first,
so that they cost next to nothing without a sink.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from manyhands.audit import sites
from manyhands.audit.kinds import Kind
from manyhands.audit.stall import Stall


@dataclass(frozen=True)
class Event:
    """One wait."""

    kind: Kind
    call: str  # what was called, as Tensor.item
    site: sites.Site
    begin: float  # of time.perf_counter
    seconds: float
    nbytes: int = 0
    framework: str = "torch"

    @property
    def stall(self) -> Stall:
        return Stall(self.kind, self.call, self.site, self.framework)


class Sink(Protocol):
    """Whoever wants to hear of waits."""

    def before(self, kind: Kind, call: str, site: sites.Site, framework: str = "torch") -> None:
        """The host is about to wait; may raise to forbid it."""

    def after(self, event: Event) -> None:
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

    __slots__ = ("begin", "call", "framework", "kind", "nbytes", "sinks", "site")

    def __init__(self, kind: Kind, call: str, nbytes: int, framework: str = "torch") -> None:
        self.kind, self.call, self.nbytes, self.framework = kind, call, nbytes, framework
        self.sinks = sinks()
        self.site = sites.current(3) if self.sinks else None
        self.begin = 0.0

    def __enter__(self) -> Waiting:
        if self.sinks:
            if self.site is not None:
                for sink in self.sinks:
                    sink.before(self.kind, self.call, self.site, self.framework)
            _inside.a_wait = True
            self.begin = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not self.sinks:
            return
        seconds = time.perf_counter() - self.begin
        _inside.a_wait = False
        if self.site is not None:
            event = Event(self.kind, self.call, self.site, self.begin, seconds, self.nbytes, self.framework)
            for sink in self.sinks:
                sink.after(event)
