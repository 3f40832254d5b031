"""A call that is done once, and what its jobs do to each other: one fails because of another, or waits for it.

A job may ask for a result while it runs. It is then looked whether what it asks for waits, over however many jobs, for
itself: that circle would never end, and the one that closes it gets an error. A asks for B's result, B takes C's, and C
asks for A's: A and B wait, C is told.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from manyhands.errors import TaskCancelled, WaitsForItself

if TYPE_CHECKING:
    from manyhands.engine.crew import Crew

_numbers = itertools.count()
_circles = threading.Lock()  # held while it is looked who waits for whom, in all crews


class Job:
    """A call that is done once, by some thread, when what it needs is over."""

    def __init__(self, crew: Crew | None, name: str, work: Callable[[], Any] | None) -> None:
        self.crew, self.name, self.work = crew, name, work
        self.number = next(_numbers)
        # What it touches, as far as it is known; what of that was written since; where it is listed (see the ledger).
        self.touched: set[Hashable] = set()
        self.overwritten: set[Hashable] = set()
        self.listed: set[Hashable] = set()
        self.stored_in: Callable[[Any], set[Hashable]] = lambda value: set()
        # What it does touch and write, known when it begins.
        self.really_touched: Callable[[], Iterable[Hashable]] | None = None
        self.really_written: Callable[[], Iterable[Hashable]] | None = None
        self.needs: list[Job] = []
        self.waits_for: Job | None = None  # the job whose result it has asked for while running
        self.followers: list[tuple[Job, bool]] = []
        self.missing = 0
        self.begun = self.over = False
        self.seen_at: int | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.trace: TracebackType | None = None
        self._origin: Job | None = None
        self.unsettled: dict[Job, None] = {}  # where its scope keeps it, until it has gone well

    @property
    def origin(self) -> Job:
        """The job that failed, where this one was not run because of it; else itself."""
        return self._origin or self

    def state(self) -> str:
        if not self.over:
            return "running" if self.begun else "waiting"
        return "done" if self.error is None else "cancelled" if self.cancelled() else "failed"

    def cancelled(self) -> bool:
        return isinstance(self.error, TaskCancelled) and not self.begun

    def see(self) -> None:
        """Somebody knows its error from now on."""
        if self.seen_at is None:
            self.seen_at = next(_numbers)

    def spoils(self, later: Job) -> bool:
        """Whether what it was to write is no good for another job: given later, but before the error was seen."""
        seen = (one.seen_at for one in (self, self.origin))
        return self.number < later.number and not any(at is not None and at < later.number for at in seen)

    def wait(self, timeout: float | None) -> None:
        if not self.over:
            assert self.crew is not None
            self.crew.wait(self, timeout)

    def raise_error(self) -> None:
        if self.error is not None:
            self.see()
            raise self.error.with_traceback(self.trace)


def doom(job: Job, origin: Job) -> None:
    """It will not be run, because of the job that failed."""
    if job.error is None:
        failure = origin.error
        job.error = TaskCancelled(
            f"{job.name} was not run: it needs {origin.name}, which failed with {type(failure).__name__}: {failure}"
        )
        job.error.__cause__ = failure
        job._origin = origin


def ask(me: Job, wanted: Job) -> None:
    """Note that a job waits for another one, unless that one waits for it."""
    with _circles:
        reached: dict[Job, Job | None] = {wanted: None}
        stack = [wanted]
        while stack and me not in reached:
            one = stack.pop()
            for need in (*one.needs, *([one.waits_for] if one.waits_for else ())):
                if not need.over and need not in reached:
                    reached[need] = one
                    stack.append(need)
        if me in reached:
            way, last = [me], reached[me]
            while last is not None:
                way.append(last)
                last = reached[last]
            circle = ", which waits for ".join(job.name for job in reversed(way)) if len(way) > 1 else "itself"
            raise WaitsForItself(
                f"{me.name} asks for the result of {circle}: nobody could ever go on. Give the result as an argument, "
                "task(fn)(future), of a task that was given before"
            )
        me.waits_for = wanted


def settle(jobs: dict[Job, None]) -> None:
    """Raise the first error that nobody has seen; what was cancelled because of it is not an error of its own.

    What is over is nobody's business then, and is let go of.
    """
    failed = [job for job in jobs if job.error is not None and job.seen_at is None and not job.cancelled()]
    for job in [job for job in jobs if job.over]:
        job.unsettled.pop(job, None)
    for job in failed:
        job.see()
    if failed:
        if len(failed) > 1 and failed[0].error is not None:
            failed[0].error.add_note(f"failed as well: {', '.join(job.name for job in failed[1:])}")
        failed[0].raise_error()
