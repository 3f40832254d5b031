"""Stop signals (SIGTERM, Ctrl-C): a signal ends a job after its current step, with a checkpoint.

``SIGTERM`` (a scheduler, ``docker stop``), ``SIGUSR1`` (SLURM's ``--signal=USR1@120``) and ``SIGINT`` (Ctrl-C) are
noted while ``fit`` runs in the main thread; the loop looks at the note between two steps. A second Ctrl-C stops at
once. Handlers of the caller's own are left alone, and ours are gone when ``fit`` is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from manyhands.amounts import counted
from manyhands.training import launcher
from manyhands.training.result import Result

NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")
_OF_PYTHON = (signal.SIG_DFL, signal.default_int_handler)
_SAME_PRESS = 2.0  # seconds: a launcher hands on the Ctrl-C that its processes have seen already


@dataclass
class Requests:
    """Which signal has asked this process to stop; None: no signal has."""

    asked: str | None = None
    # In a worker: why its caller's callbacks want the training to end, as :mod:`..callbacks.dispatcher` answers.
    wish: dict[str, Any] | None = None
    _when: float = 0.0

    def clear(self) -> None:
        """A new job begins."""
        self.asked = self.wish = None

    def ask(self, name: str) -> None:
        """Note a request; the first one counts."""
        if self.asked is None:
            self.asked, self._when = name, time.monotonic()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """As a handler of signals."""
        name, before = signal.Signals(number).name, self.asked
        if name != "SIGINT":
            self.ask(name)
        elif before is None:
            self.ask(name)
            with contextlib.suppress(OSError):  # not print: it may be interrupted within itself
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")
        elif not launcher.is_launched() or time.monotonic() - self._when > _SAME_PRESS:
            raise KeyboardInterrupt


_current = Requests()


def current() -> Requests:
    """The requests to this process: signals that it got, or what a worker's caller passed on."""
    return _current


@contextlib.contextmanager
def noted() -> Iterator[Requests]:
    """Note signals within the block; only in the main thread, and only those without a handler of the caller."""
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Requests()
        return
    before: dict[Any, Any] = {}
    outer, _current = _current, Requests()
    try:
        for number in (getattr(signal, name) for name in NAMES):
            if signal.getsignal(number) in _OF_PYTHON:
                before[number] = signal.signal(number, _current.handle)
        yield _current
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _current = outer


class Stopped(BaseException):
    """A signal has ended ``fit`` after a whole step; ``result`` is what came of the job until then.

    The model has the weights of that moment, and where the trainer has a ``run``, a checkpoint was written. By Ctrl-C
    it is a ``KeyboardInterrupt`` too, by other signals a ``SystemExit`` with the code 128 + the signal's number: 143
    for ``SIGTERM``, 138 for ``SIGUSR1`` on Linux. So a program that does not catch it ends as its caller expects: with
    that code, and 130 after Ctrl-C.
    """

    result: Result

    @staticmethod
    def by(result: Result) -> Stopped:
        """The error of a job that was stopped."""
        name = result.signal or "SIGTERM"
        code = exit_code(name)
        error: Stopped = Interrupted() if name == "SIGINT" else Terminated(code)
        if name == "SIGINT":
            _end_with_code_of_signal()
        error.result = result
        error.add_note(
            f"{name}: stopped. The model has the weights that it had after {counted(result.steps, 'step')} of training."
        )
        if result.run is not None:
            error.add_note(f"The checkpoint of that step is in {result.run}: resume='auto' continues from it.")
        return error


class Interrupted(Stopped, KeyboardInterrupt):
    """Stopped by Ctrl-C."""


class Terminated(Stopped, SystemExit):
    """Stopped by SIGTERM or SIGUSR1."""


class _Hook:
    """The program's ``sys.excepthook``, after which Ctrl-C ends it with 130.

    Python does that for ``KeyboardInterrupt`` alone, and not for a class derived from it.
    """

    def __init__(self, shown: Callable[..., object]) -> None:
        self._shown = shown

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._shown(kind, error, traceback)
        if isinstance(error, Interrupted):
            raise SystemExit(exit_code("SIGINT"))


def _end_with_code_of_signal() -> None:
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def exit_code(name: str) -> int:
    """The exit status of a process that a signal has stopped, as shells count it.

    >>> exit_code("SIGTERM"), exit_code("SIGINT")
    (143, 130)
    """
    return 128 + int(signal.Signals[name])
