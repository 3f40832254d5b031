"""One task of a scope: a call, what it touches, what it waits for, and what has become of it.

The arguments are examined when the task is submitted, to know which tasks it must follow. Much may have changed when it
starts: a result is known, a list has another item, a module has another parameter. So they are examined again then.

A job may ask for another job's result while it runs. If that other job waits, directly or through further jobs, for the
asking job, there is a deadlock, and the job that closes the cycle gets an error. For example A asks for B's result, B
takes C's, and C asks for A's: A and B wait, and C's request raises.
"""

from __future__ import annotations

import contextvars
import itertools
import operator
import threading
from collections.abc import Callable, Hashable, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from manyhands.errors import TaskCancelled, UndeclaredWrite, WaitsForItself, type_in_words
from manyhands.tasks.arguments import FrameworkHooks, Future, Touched, look, replace_parts, states

if TYPE_CHECKING:
    from manyhands.tasks.scope import parallel

T = TypeVar("T")
Function = Callable[..., object]

# Why a job waits for another: it touches the same memory; it takes its result.
ORDER, TAKES = range(2)
NOTHING: Set[Hashable] = frozenset()
_numbers = itertools.count()
_OF_PYTHON = FrameworkHooks()
_circles = threading.Lock()  # held while looking for a cycle of waiting jobs, across all pools of workers


class ThreadState(threading.local):
    """The state of this thread."""

    scope: parallel | None = None  # the open scope; None in a thread that runs a task
    job: TaskCall | None = None  # the job that this thread runs


thread_state = ThreadState()


class TaskCall:
    """A call that some thread makes once, when the jobs that it needs are done; then its arguments are released."""

    def __init__(
        self,
        function: Function,
        arguments: tuple[object, ...],
        keywords: dict[str, object],
        writes: tuple[object, ...] = (),
        scope: parallel | None = None,
    ) -> None:
        self.name: str = getattr(function, "__qualname__", None) or repr(function)
        self.number = next(_numbers)
        self._arguments, self._keywords, self._writes = (function, *arguments), keywords, writes
        self.workers, self._hooks = (scope.workers, scope.hooks) if scope else (None, _OF_PYTHON)
        self.unsettled = scope.jobs if scope else {}  # where its scope keeps it, until it has succeeded
        self._bound = self._hooks.bound(operator.call)
        self._context: contextvars.Context | None = contextvars.copy_context()
        # What it touches, as far as known; what of that was written since; where it is listed (see Dependencies).
        self.touched = self.overwritten = self.listed = NOTHING
        self.needs: tuple[TaskCall, ...] = ()
        self.followers: list[tuple[TaskCall, int]] = []  # and why
        self.missing = 0
        self.waits_for: TaskCall | None = None  # the job whose result it has asked for while running
        self.ready = self.begun = self.over = False
        self.value: Any = None  # the result of the function; its Future has the type
        self.error: BaseException | None = None
        self.trace: TracebackType | None = None
        self.raised_at: int | None = None
        self._origin: TaskCall | None = None

    def release(self) -> None:
        """Release what it needed to run: it will not be run any more."""
        self._arguments, self._keywords, self._writes = (), {}, ()
        self._context = None

    # What it touches

    def look(self) -> tuple[Set[Hashable], Set[Hashable], list[TaskCall]]:
        """The memories that it reads and writes, as far as they are known, and the jobs whose results it takes."""
        reads = self._reads()
        if not self._writes:
            return reads.memories, reads.exclusive, reads.inputs
        writes = look(self._hooks, *self._writes)
        return reads.memories, writes.memories | reads.exclusive, reads.inputs + writes.inputs

    def written(self) -> Set[Hashable]:
        """The memories that it writes."""
        return look(self._hooks, *self._writes).memories if self._writes else NOTHING

    def stored_in(self) -> Set[Hashable]:
        """The memories that its result is in."""
        return look(self._hooks, self.value).memories

    def _reads(self) -> Touched:
        return look(self._hooks, *self._arguments, *self._keywords.values())

    # Running

    def work(self) -> object:
        """Make the call; returns the result."""
        touched, arguments, keywords = self._reads(), self._arguments, self._keywords
        if touched.inputs:
            arguments, keywords = fill(arguments), fill(keywords)
        before = states(touched, self.written())
        assert self._context is not None
        value = self._context.run(call_at_once, self._bound, arguments, keywords)
        if changed := [argument for argument, state_of, state in before if state_of(argument) != state]:
            shape = getattr(changed[0], "shape", None)
            what = type_in_words(changed[0]) + ("" if shape is None else f" of shape {tuple(shape)}")
            raise UndeclaredWrite(
                f"{self.name}: {what} that it reads was written to while it ran, and no task has "
                "declared that. Tasks that read it may have done so before or after. Where this task changes it (in "
                "place, by a layer with running averages, by a backward pass that fills its gradient), write task(fn, "
                "writes=(x,))(x); where other code does, let it wait with result() or waitall() first"
            )
        return value

    # What has become of it

    @property
    def origin(self) -> TaskCall:
        """The job whose failure cancelled this one, or the job itself."""
        return self._origin or self

    def state(self) -> str:
        if not self.over:
            return "running" if self.begun else "waiting"
        return "done" if self.error is None else "cancelled" if self.cancelled() else "failed"

    def cancelled(self) -> bool:
        return isinstance(self.error, TaskCancelled) and not self.begun

    def cancel_because_of(self, origin: TaskCall) -> None:
        """Cancel it because of the one that failed."""
        if self.error is None:
            failure = origin.error
            self.error = TaskCancelled(
                f"{self.name} was not run: it needs {origin.name}, which failed with {type(failure).__name__}: "
                f"{failure}"
            )
            self.error.__cause__ = failure
            self._origin = origin

    def note_raised(self) -> None:
        """Its error has been raised to the caller."""
        if self.raised_at is None:
            self.raised_at = next(_numbers)

    def blocks(self, later: TaskCall) -> bool:
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

    def note_wait(self, awaited: TaskCall) -> None:
        """Note that it waits for another; raises if that one waits for it."""
        with _circles:
            reached: dict[TaskCall, TaskCall | None] = {awaited: None}
            stack = [awaited]
            while stack and self not in reached:
                job = stack.pop()
                for need in (*job.needs, job.waits_for) if job.waits_for else job.needs:
                    if not need.over and need not in reached:
                        reached[need] = job
                        stack.append(need)
            if self in reached:
                path, last = [self], reached[self]
                while last is not None:
                    path.append(last)
                    last = reached[last]
                circle = ", which waits for ".join(job.name for job in reversed(path)) if len(path) > 1 else "itself"
                raise WaitsForItself(
                    f"{self.name} asks for the result of {circle}: that is a deadlock. Pass the result as an argument, "
                    "task(fn)(future), of a task that was submitted before"
                )
            self.waits_for = awaited


def call_at_once(function: Callable[..., T], arguments: tuple[object, ...], keywords: dict[str, object]) -> T:
    """A plain call, in which tasks are plain calls as well."""
    before, thread_state.scope = thread_state.scope, None
    try:
        return function(*arguments, **keywords)
    finally:
        thread_state.scope = before


def fill(value: T) -> T:
    """The value with results in place of futures; the same object if there is no future in it."""
    return cast(T, replace_parts(value, lambda part: part.result() if isinstance(part, Future) else part))


def raise_first_error(jobs: dict[TaskCall, None]) -> None:
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
