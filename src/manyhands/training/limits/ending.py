"""When a job ends: decided between two steps, the same in all of its processes.

The number of steps is known everywhere. The clock and signals are not: there the processes decide together. To ask the
others makes the host wait, so it is not done after every step but about once a second, after steps that the first
process chooses::

    step      1    2  ...  40  ...  81  ...
    asked     *             *        *        the first process measured 40 steps a second

A single process stops after the step in which the signal came. A callback that stops the training from
``on_steps`` is heard in the same way: no step waits for its answer.
"""

from __future__ import annotations

import json
import time
from typing import Any

from manyhands.training.learner import Learner
from manyhands.training.limits import stop_signals
from manyhands.training.options import Limits

ENDLESS = 2**31 - 1  # epochs of a job that something else ends
_ASK_EVERY = 1.0  # seconds between two questions to the other processes
_MOST_STEPS = 1000


class StopNow(BaseException):
    """Ends an evaluation that a signal has come in: it may take longer than a scheduler waits."""


class Ending:
    """Decides after each step whether the job ends, and knows what ended it."""

    def __init__(self, learner: Learner, limits: Limits) -> None:
        self.learner, self.limits = learner, limits
        self.requests = stop_signals.current()
        self.signal: str | None = None  # that has stopped the job
        self.reached: str | None = None  # the limit that has ended it: "max_steps" or "max_time"
        self.wish: dict[str, Any] | None = None  # in the first process: a callback's, to end the training
        self.stop: dict[str, Any] | None = None  # that wish, when all processes know it
        self._before = 0.0  # seconds of training in the jobs that this one resumes
        self._begun = self._asked_at = time.monotonic()
        self._asked_step: int | None = None
        self._ask_at = 0

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
        elif self.limits.max_time is not None and self._before >= float(self.limits.max_time):  # type: ignore[arg-type]
            self.reached = "max_time"
        return self.reached is not None

    def check(self, step: int) -> bool:
        """Whether the job ends after this many steps; asks the other processes now and then."""
        if self.is_reached(step) or self.signal or self.stop:
            return True
        if self.learner.size == 1:
            self._decide(self.requests.asked, self._wish(), time_is_up=self._time_is_up())
        elif step >= self._ask_at:
            self._ask_all(step)
        return bool(self.reached or self.signal or self.stop)

    def interrupt_evaluation(self) -> None:
        """Raise where a signal has come; a resumed job evaluates again.

        Several processes are somewhere else each, and cannot agree on it.
        """
        if self.learner.size == 1 and self.requests.asked is not None:
            self.signal = self.requests.asked
            raise StopNow

    def _time_is_up(self) -> bool:
        return self.limits.max_time is not None and self.seconds >= float(self.limits.max_time)  # type: ignore[arg-type]

    def _wish(self) -> dict[str, Any] | None:
        return self.wish or self.requests.wish

    def _decide(self, name: str | None, wish: dict[str, Any] | None, *, time_is_up: bool) -> None:
        self.signal = name
        if name is not None:
            return
        if time_is_up:
            self.reached = "max_time"
        else:
            self.stop = wish

    def _ask_all(self, step: int) -> None:
        wants = 0 if self.requests.asked is None else 1 + stop_signals.NAMES.index(self.requests.asked)
        nobody = self.learner.all_have(wants) and not wants
        name = None if nobody else self._signal_of_any(wants)
        first: dict[str, Any] = {"up": self._time_is_up(), "wish": self._wish()}
        first["next"] = step + self._steps_a_second(step)
        first = json.loads(self.learner.from_first(json.dumps(first).encode()))
        self._ask_at = first["next"]
        self._decide(name, first["wish"], time_is_up=first["up"])

    def _signal_of_any(self, wants: int) -> str:
        """The signal that some process got; all processes ask for each in turn, so that all find the same."""
        for number, name in enumerate(stop_signals.NAMES, 1):
            got_signal = int(wants == number)
            if not self.learner.all_have(got_signal) or got_signal:
                return name
        return stop_signals.NAMES[0]

    def _steps_a_second(self, step: int) -> int:
        """Steps until the next question, by the speed since the last one."""
        now = time.monotonic()
        seconds = now - self._asked_at
        steps = 0 if self._asked_step is None else step - self._asked_step
        self._asked_at, self._asked_step = now, step
        if not steps or not seconds:
            return 1
        return max(1, min(_MOST_STEPS, round(_ASK_EVERY * steps / seconds)))
