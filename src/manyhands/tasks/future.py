"""The result of a task, for the code that submitted it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from manyhands.tasks.job import Job

T = TypeVar("T")


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
        self._job.wait(timeout)
        self._job.raise_error()
        return self._job.value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the task; returns its error or None. The error then counts as raised."""
        self._job.wait(timeout)
        self._job.note_raised()
        return self._job.error

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is not its result, and neither true nor false: write .result()")

    def __repr__(self) -> str:
        return f"<Future of {self._job.name}: {self._job.state()}>"
