"""When a job ends: limits, signals and callbacks, decided between two steps, the same in all of its processes.

The number of steps is known everywhere. The clock and signals are not: there the processes decide together. To ask the
others makes the host wait, so it is not done after every step but about once a second, after steps that the first
process chooses::

    step      1  2  4  8  16  32  64  ...  104  ...  144  ...
    asked     *  *  *  *  *   *   *         *         *        the first process measured 40 steps a second

A single process stops after the step in which the signal came. A callback that stops the training from
``on_steps`` is heard in the same way: no step waits for its answer.

``SIGTERM`` (a scheduler, ``docker stop``), ``SIGUSR1`` (SLURM's ``--signal=USR1@120``) and ``SIGINT`` (Ctrl-C) are
recorded while ``fit`` runs in the main thread, and looked at between two steps. A second Ctrl-C stops at once. The
caller's handlers stay, and ours are removed when ``fit`` ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from manyhands.amounts import count_of
from manyhands.training import launcher
from manyhands.training.learner import Learner, share
from manyhands.training.options import Limits
from manyhands.training.result import Result

_ASK_EVERY = 1.0  # seconds between two questions to the other processes
_MOST_STEPS = 1000


class StopNow(BaseException):
    """Ends an evaluation that a signal has come in: it may take longer than a scheduler waits."""


class Ending:
    """Decides after each step whether the job ends, and knows what ended it."""

    def __init__(self, learner: Learner, limits: Limits) -> None:
        self.learner, self.limits = learner, limits
        self.requests = current_requests()
        self.signal: str | None = None  # that has stopped the job
        self.reached: str | None = None  # the limit that has ended it: "max_steps" or "max_time"
        self.stop: dict[str, Any] | None = None  # the callback that ends it, and why, when all processes know it
        self.wish: dict[str, Any] | None = None  # the same in the first process, before the others know
        self._before = 0.0  # seconds of training in the jobs that this one resumes
        self._begun = self._asked_at = time.monotonic()
        self._asked_step: int | None = None
        self._ask_at = 0

    @property
    def reason(self) -> str | None:
        """Why the training ends, for ``Result.ended``, if a signal or a callback ends it."""
        if self.signal is not None:
            return f"signal {self.signal}"
        return None if self.stop is None else f"{self.stop['by']}: {self.stop['stop']}"

    @property
    def seconds(self) -> float:
        """The training time of the whole run so far."""
        return self._before + time.monotonic() - self._begun

    def resume(self, seconds: float) -> None:
        self._before = seconds

    def is_reached(self, step: int) -> bool:
        """Whether a limit of steps or time was reached; every process knows it."""
        if self.limits.max_steps is not None and step >= self.limits.max_steps:
            self.reached = "max_steps"
        elif self._is_time_up(self._before):
            self.reached = "max_time"
        return self.reached is not None

    def take(self, answer: dict[str, Any]) -> None:
        """Take the callbacks' answer, the same in every process: whether to end the training, and why."""
        if self.stop is None and answer.get("stop") is not None:
            self.stop = answer

    def check(self, step: int) -> bool:
        """Whether the job ends after this many steps; asks the other processes now and then."""
        if not (self.is_reached(step) or self.reason):
            if self.learner.size == 1:
                self._decide(self.requests.asked, self._wish(), time_is_up=self._is_time_up(self.seconds))
            elif step >= self._ask_at:
                self._ask_all(step)
        return bool(self.reached or self.reason)

    def interrupt_evaluation(self) -> None:
        """Raise where a signal has come; a resumed job evaluates again.

        Several processes are somewhere else each, and cannot agree on it.
        """
        if self.learner.size == 1 and self.requests.asked is not None:
            self.signal = self.requests.asked
            raise StopNow

    def _is_time_up(self, seconds: float) -> bool:
        return self.limits.max_time is not None and seconds >= float(self.limits.max_time)  # type: ignore[arg-type]

    def _wish(self) -> dict[str, Any] | None:
        return self.wish or self.requests.wish

    def _decide(self, name: str | None, wish: dict[str, Any] | None, *, time_is_up: bool) -> None:
        self.signal = name
        if name is not None:
            return
        if time_is_up:
            self.reached = "max_time"
        else:
            self.take(wish or {})

    def _ask_all(self, step: int) -> None:
        asked = self.requests.asked
        nobody = self.learner.all_have(int(asked is not None)) and asked is None
        first: dict[str, Any] = {"signal": asked, "up": self._is_time_up(self.seconds), "wish": self._wish()}
        first = share(self.learner, {**first, "next": step + self._steps_a_second(step)})
        self._ask_at = first["next"]
        # A signal that the first process did not get is like SIGTERM.
        self._decide(None if nobody else first["signal"] or "SIGTERM", first["wish"], time_is_up=first["up"])

    def _steps_a_second(self, step: int) -> int:
        """Steps until the next question: a second's, but not long after few steps, which a loader had read ahead."""
        now = time.monotonic()
        seconds = now - self._asked_at
        steps = 0 if self._asked_step is None else step - self._asked_step
        self._asked_at, self._asked_step = now, step
        if not steps or not seconds:
            return 1
        return max(1, min(_MOST_STEPS, 2 * steps, round(_ASK_EVERY * steps / seconds)))


# Signals


SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
_OF_PYTHON = (signal.SIG_DFL, signal.default_int_handler)
_SAME_PRESS = 2.0  # seconds: a launcher hands on the Ctrl-C that its processes have seen already


@dataclass
class Requests:
    """Which signal has asked this process to stop; None: no signal has."""

    asked: str | None = None
    # In a worker: why its caller's callbacks want the training to end, as :mod:`.callbacks.events` answers.
    wish: dict[str, Any] | None = None
    _when: float = 0.0

    def clear(self) -> None:
        """A new job begins."""
        self.asked = self.wish = None

    def ask(self, name: str) -> None:
        """Note a request; the first one counts."""
        if self.asked is None:
            self.asked, self._when = name, time.monotonic()

    def handler(self) -> Callable[[int, FrameType | None], None]:
        """A handler of signals for this process; in its forks, a loader's workers, it does nothing."""
        process = os.getpid()
        return lambda number, _: self._handle(number) if os.getpid() == process else None

    def _handle(self, number: int) -> None:
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


def current_requests() -> Requests:
    """The requests to this process: signals that it got, or what a worker's caller passed on."""
    return _current


@contextlib.contextmanager
def record_signals() -> Iterator[Requests]:
    """Record signals within the block; only in the main thread, and only those without a handler of the caller."""
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Requests()
        return
    before: dict[Any, Any] = {}
    outer, _current = _current, Requests()
    try:
        for number in (getattr(signal, name) for name in SIGNALS):
            if signal.getsignal(number) in _OF_PYTHON:
                before[number] = signal.signal(number, _current.handler())
        yield _current
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _current = outer


class Stopped(BaseException):
    """A signal has ended ``fit`` after a whole step; ``result`` is what came of the job until then.

    The model has the weights of that moment, and where the trainer has a ``run``, a checkpoint was written. By Ctrl-C
    it is a ``KeyboardInterrupt`` too, by other signals a ``SystemExit`` with the code 128 + the signal's number: 143
    for ``SIGTERM``, 138 for ``SIGUSR1`` on Linux.
    """

    result: Result

    @staticmethod
    def by(result: Result) -> Stopped:
        """The error of a job that was stopped."""
        name = result.signal or "SIGTERM"
        error: Stopped = Interrupted() if name == "SIGINT" else Terminated(128 + int(signal.Signals[name]))
        error.result = result
        error.add_note(
            f"{name}: stopped. The model has the weights that it had after {count_of(result.steps, 'step')}."
        )
        if result.run is not None:
            error.add_note(f"The checkpoint of that step is in {result.run}: resume='auto' continues from it.")
        return error


class Interrupted(Stopped, KeyboardInterrupt):
    """Stopped by Ctrl-C."""


class Terminated(Stopped, SystemExit):
    """Stopped by SIGTERM or SIGUSR1."""
