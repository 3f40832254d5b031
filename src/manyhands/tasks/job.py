"""One job of a scope, and how jobs affect each other: a job fails because of another, or waits for it.

A job may ask for another job's result while it runs. If that other job waits, directly or through further jobs, for the
asking job, there is a deadlock, and the job that closes the cycle gets an error. For example A asks for B's result, B
takes C's, and C asks for A's: A and B wait, and C's request raises.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from manyhands.errors import TaskCancelled, WaitsForItself

if TYPE_CHECKING:
    from manyhands.tasks.workers import WorkerPool

T = TypeVar("T")

_numbers = itertools.count()
_circles = threading.Lock()  # held while looking for a cycle of waiting jobs, across all pools of workers


# Memories that a job reads, those that it writes, the jobs whose results it takes, and those whose results it can
# reach; a job stands for its result.
Touched: TypeAlias = "tuple[Set[Hashable], Set[Hashable], list[Job], list[Job]]"

# Why a job waits for another: it touches the same memory; it can reach its result; it takes its result.
ORDER, REACHES, TAKES = range(3)

NOTHING: Set[Hashable] = frozenset()


class Job:
    """A unit of work that some thread does once, when the jobs that it needs are done.

    The base class touches nothing and does nothing, like a call that was made immediately; subclasses do the work.
    """

    __slots__ = (
        *("_origin", "begun", "workers", "error", "followers", "listed", "missing", "name", "needs", "number"),
        *("over", "overwritten", "raised_at", "touched", "trace", "unsettled", "value", "waits_for"),
    )

    def __init__(self, workers: WorkerPool | None, name: str, unsettled: dict[Job, None]) -> None:
        self.workers, self.name = workers, name
        self.number = next(_numbers)
        # What it touches, as far as known; what of that was written since; where it is listed (see Dependencies).
        self.touched = self.overwritten = self.listed = NOTHING
        self.needs: tuple[Job, ...] = ()
        self.waits_for: Job | None = None  # the job whose result it has asked for while running
        self.followers: list[tuple[Job, int]] | None = None  # and why
        self.missing = 0
        self.begun = self.over = False
        self.raised_at: int | None = None
        self.value: Any = None  # the result of the function; its Future has the type
        self.error: BaseException | None = None
        self.trace: TracebackType | None = None
        self._origin: Job | None = None
        self.unsettled = unsettled  # where its scope keeps it, until it has succeeded

    def look(self) -> Touched:
        """The memories it touches, as far as they are known."""
        return NOTHING, NOTHING, [], []

    def accessed(self) -> Set[Hashable]:
        """The memories it really touches, known when it starts."""
        return NOTHING

    def written_memories(self) -> Set[Hashable]:
        """Those of them that it writes."""
        return NOTHING

    def stored_in(self, value: object) -> Set[Hashable]:
        """The memories that its result is in."""
        return NOTHING

    def work(self) -> object:
        """Do the work; returns the result."""
        return self.value

    def release(self) -> None:
        """Release what it needed to run: it will not be run any more."""

    @property
    def origin(self) -> Job:
        """The job whose failure cancelled this one, or the job itself."""
        return self._origin or self

    def state(self) -> str:
        if not self.over:
            return "running" if self.begun else "waiting"
        return "done" if self.error is None else "cancelled" if self.cancelled() else "failed"

    def cancelled(self) -> bool:
        return isinstance(self.error, TaskCancelled) and not self.begun

    def note_raised(self) -> None:
        """Its error has been raised to the caller."""
        if self.raised_at is None:
            self.raised_at = next(_numbers)

    def blocks(self, later: Job) -> bool:
        """Whether a later job must not use what this failed one should have written: its error was not raised yet."""
        seen = (failed.raised_at for failed in (self, self.origin))
        return self.number < later.number and not any(at is not None and at < later.number for at in seen)

    def wait(self, timeout: float | None) -> None:
        if not self.over:
            assert self.workers is not None
            self.workers.wait(self, timeout)

    def raise_error(self) -> None:
        if self.error is not None:
            self.note_raised()
            raise self.error.with_traceback(self.trace)


class Future(Generic[T]):
    """The result of a task that may still be running."""

    __slots__ = ("__weakref__", "_job")

    def __init__(self, job: Job) -> None:
        self._job = job

    def done(self) -> bool:
        """Whether it is over: it has a result, an error, or was cancelled."""
        return self._job.over

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; raises the error of the task, or ``TimeoutError`` after ``timeout`` seconds."""
        job = self._job
        if not job.over:
            job.wait(timeout)
        if job.error is not None:
            job.raise_error()
        return job.value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the task; returns its error or None. The error then counts as raised."""
        self._job.wait(timeout)
        self._job.note_raised()
        return self._job.error

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is not its result, and neither true nor false: write .result()")

    def __repr__(self) -> str:
        return f"<Future of {self._job.name}: {self._job.state()}>"


def cancel_because_of(job: Job, origin: Job) -> None:
    """Cancel a job because of the one that failed."""
    if job.error is None:
        failure = origin.error
        job.error = TaskCancelled(
            f"{job.name} was not run: it needs {origin.name}, which failed with {type(failure).__name__}: {failure}"
        )
        job.error.__cause__ = failure
        job._origin = origin


def note_wait(waiting: Job, awaited: Job) -> None:
    """Note that a job waits for another; raises if that one waits for it."""
    with _circles:
        reached: dict[Job, Job | None] = {awaited: None}
        stack = [awaited]
        while stack and waiting not in reached:
            job = stack.pop()
            for need in (*job.needs, job.waits_for) if job.waits_for else job.needs:
                if not need.over and need not in reached:
                    reached[need] = job
                    stack.append(need)
        if waiting in reached:
            way, last = [waiting], reached[waiting]
            while last is not None:
                way.append(last)
                last = reached[last]
            circle = ", which waits for ".join(step.name for step in reversed(way)) if len(way) > 1 else "itself"
            raise WaitsForItself(
                f"{waiting.name} asks for the result of {circle}: that is a deadlock. Pass the result as an argument, "
                "task(fn)(future), of a task that was submitted before"
            )
        waiting.waits_for = awaited


def raise_first_error(jobs: dict[Job, None]) -> None:
    """Raise the first error that has not been raised yet; tasks cancelled because of it are not reported separately.

    Jobs that are done are released.
    """
    failed = [job for job in jobs if job.error is not None and job.raised_at is None and not job.cancelled()]
    for job in [job for job in jobs if job.over]:
        job.unsettled.pop(job, None)
    for job in failed:
        job.note_raised()
    if failed:
        if len(failed) > 1 and failed[0].error is not None:
            names = [job.name for job in failed[1:]]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            failed[0].error.add_note(f"failed as well: {', '.join(names[:5])}{more}")
        failed[0].raise_error()
