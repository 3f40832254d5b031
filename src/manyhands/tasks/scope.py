"""Explicit tasks: for code that cannot be traced because what it does depends on values.

::

    with parallel():
        a = task(load)("a.txt")             # runs in parallel with what follows
        b = task(load)("b.txt")
        c = task(merge)(a, b)               # starts when both are done
        task(scale, writes=(table,))(table)  # after everything before that reads ``table``
        d = task(summary)(table, c)         # after ``scale``
        print(d.result())                   # waits for what ``d`` needs
    # here all tasks are done

The results are those of the same calls made one after the other, as far as manyhands knows what a task touches. It
*reads* its arguments (:mod:`manyhands.tasks.arguments`) and *writes* what it declares. Of two tasks that touch the same
memory, one of them writing, the earlier one goes first. What a function takes from elsewhere (closures, globals,
attributes of objects) is shared between threads as in any thread pool: pass it, or declare it. Until a task is done,
its result may be, or share memory with, any of its arguments. A task that writes to an argument without declaring it
fails with :class:`~manyhands.errors.UndeclaredWrite`, because the order in which others have read it is unknown.

Errors: every call of ``result()`` raises a failed task's error with its traceback. Leaving the scope, and
:func:`waitall`, raise the first error that has not been raised yet. A task that needs a failed one, because it takes
its result or an object that it was to write, is cancelled: :class:`~manyhands.errors.TaskCancelled` names the one that
failed. Once the error has been raised, tasks that are submitted later may use the object again.

Scopes: an inner scope shares the threads and the order of the outer one, and waits for its own tasks only. A scope that
is left by an error or an interrupt cancels tasks that have not started and waits for those that have. Outside a scope,
and inside a task, ``task(fn)(...)`` is a plain call. A scope belongs to its thread and its process: a child of
``os.fork`` has no scope, and unfinished futures raise an error there.
"""

from __future__ import annotations

import functools
import numbers
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from manyhands.errors import EngineError, type_in_words
from manyhands.machine import usable_cores
from manyhands.tasks.arguments import PLAIN, FrameworkHooks, Future
from manyhands.tasks.job import TaskCall, call_at_once, fill, raise_first_error, thread_state
from manyhands.tasks.workers import WorkerPool

__all__ = ["Future", "parallel", "task", "waitall"]

T = TypeVar("T")
_OF_PYTHON = FrameworkHooks()


class parallel:
    """A scope whose tasks run in parallel where their order does not matter.

    ``threads``: how many tasks run at once (by default one per usable core). ``synchronous``: for debugging, every task
    runs when it is submitted, in the caller's thread; errors are raised where they would be otherwise. ``hooks``: what
    the framework says of its objects.
    """

    def __init__(
        self, threads: int | None = None, *, synchronous: bool = False, hooks: FrameworkHooks = _OF_PYTHON
    ) -> None:
        if threads is not None and (type(threads) is bool or not isinstance(threads, numbers.Integral) or threads < 1):
            raise EngineError(
                f"parallel(threads={threads!r}): give a whole number of tasks that run at once, at least 1; the "
                "default is one thread per usable core, and synchronous=True uses none"
            )
        self._threads, self._synchronous = threads, synchronous
        self.hooks = hooks
        self.jobs: dict[TaskCall, None] = {}  # those that are not over, or whose error has not been raised yet
        self.workers: WorkerPool | None = None
        self._outer: parallel | None = None

    def __enter__(self) -> parallel:
        if self.workers is not None:
            raise EngineError("this scope is open already: make another with parallel()")
        self._outer = _scope()
        if self._outer is None:
            self.workers = WorkerPool(0 if self._synchronous else self._threads or usable_cores())
        elif self._threads is not None or self._synchronous:
            raise EngineError("an inner scope uses the threads of the outer one: write parallel() without arguments")
        else:
            self.workers, self.hooks = self._outer.workers, self._outer.hooks
        thread_state.scope = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers, self.workers = self.workers, None
        thread_state.scope = self._outer
        assert workers is not None
        if workers.process != os.getpid():
            return
        try:
            if error is not None:
                workers.cancel(self.jobs, f"its scope was left by {type(error).__name__}")
            _wait_for(self.jobs)
        except BaseException as interrupt:
            workers.cancel(self.jobs, f"its scope was left by {type(interrupt).__name__}")
            if error is None:  # a second interrupt is not waited for
                _wait_for(self.jobs)
            raise
        finally:
            if self._outer is None:
                workers.close(join=all(job.over for job in self.jobs))
        if error is None:
            raise_first_error(self.jobs)


def task(function: Callable[..., T], *, writes: tuple[object, ...] = ()) -> Callable[..., Future[T]]:
    """A function whose calls are tasks: ``task(fn)(a, b)`` gives a :class:`Future`.

    Arguments may be futures, also inside lists, tuples, dicts, sets, deques, ``ChainMap``, dataclasses and partial
    functions (``fn`` itself, too): the function gets their results. ``writes`` are the objects that the call changes,
    as a tuple: arguments, futures, or things that the function knows from elsewhere.
    """
    if not callable(function):
        raise TypeError(
            f"task(fn) takes a function, not {type_in_words(function)}: write task(fn)(x), which calls it as a task; "
            "in task(fn(x)) it has been called already"
        )
    if not isinstance(writes, tuple):
        raise TypeError(f"task(..., writes=...) takes a tuple: write writes=(x,), not {type_in_words(writes)}")
    for write in writes:
        if isinstance(write, PLAIN):
            raise TypeError(f"task(..., writes=...): {write!r} cannot be written to")

    @functools.wraps(function)
    def submit(*arguments: object, **keywords: object) -> Future[T]:
        if (scope := _scope()) is not None:
            job = TaskCall(function, arguments, keywords, writes, scope)
            assert scope.workers is not None
            scope.workers.submit(job)
        else:
            job = TaskCall(function, (), {})
            job.value = call_at_once(fill(function), fill(arguments), fill(keywords))
            job.begun = job.over = True
            job.release()
        return Future(job)

    return submit


def waitall() -> None:
    """Wait for all tasks of the scopes open in this thread; raise the first error that has not been raised yet."""
    jobs: list[TaskCall] = []
    scope = _scope()
    while scope is not None:
        jobs = [*scope.jobs, *jobs]
        scope = scope._outer
    _wait_for(jobs)
    raise_first_error(dict.fromkeys(jobs))


def _scope() -> parallel | None:
    scope = thread_state.scope
    if scope is None or scope.workers is None or scope.workers.process != os.getpid():
        return None
    return scope


def _wait_for(jobs: Iterable[TaskCall]) -> None:
    for job in reversed([*jobs]):  # when the last is over, most others are: no thread is woken for those
        job.wait(None)
