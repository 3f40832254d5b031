"""Tasks given explicitly: for code that cannot be traced, because what it does depends on values.

::

    with parallel():
        a = task(load)("a.txt")             # runs beside what follows
        b = task(load)("b.txt")
        c = task(merge)(a, b)               # when both are there
        task(scale, writes=(table,))(table)  # after everything before that reads ``table``
        d = task(summary)(table, c)         # after ``scale``
        print(d.result())                   # waits for what ``d`` needs
    # here everything is over

What is promised: the results are those of the same calls one after the other. A task *reads* its arguments, whole
(lists, tuples and dicts with all that is in them), and *writes* what it declares. Of two tasks that touch the same
object, one of them writing, the earlier one goes first (read after write, write after read, write after write). Which
objects share memory is asked of ``memory_of``; by default each object is its own. What an object consists of besides
(a module of its parameters) is asked of ``parts_of``. The result of a task may be, or share memory with, anything that
the task was given, until it is there and can be looked at. Where the framework counts the writes to an object
(``version_of``), a task that writes to an argument without having declared it fails with
:class:`~manyhands.errors.UndeclaredWrite`: in what order others have read it is not known.

Errors: ``result()`` raises a task's error with its traceback, as often as it is asked. Leaving the scope, and
:func:`waitall`, raise the first error that nobody has seen. A task that needs a failed one, because it takes its result
or an object that it was to write, is cancelled: :class:`~manyhands.errors.TaskCancelled` names the one that failed.
Once an error has been seen, an object counts as repaired: tasks given after that may use it again.

Scopes: an inner scope shares the threads and the order of the outer one, and waits for its own tasks only. A scope left
by an error, an interrupt included, cancels what has not begun and waits for what has. Outside a scope, and inside a
task, ``task(fn)(...)`` is a plain call: it runs at once and raises at once. A scope belongs to its thread and its
process: in a child of ``os.fork`` it is as if there were none, and its unfinished futures say so.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

from manyhands.engine.arguments import must_be_threads
from manyhands.engine.crew import Crew
from manyhands.engine.job import Job, settle
from manyhands.engine.ledger import Touched
from manyhands.errors import EngineError, UndeclaredWrite
from manyhands.machine import usable_cores

T = TypeVar("T")
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, range, slice)


class Future(Generic[T]):
    """The result of a task that may still be running."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def done(self) -> bool:
        """Whether it is over: it has a result, an error, or was cancelled."""
        return self._job.over

    def result(self, timeout: float | None = None) -> T:
        """Its result, waited for; raises the task's error, or ``TimeoutError`` after ``timeout`` seconds."""
        self._job.wait(timeout)
        self._job.raise_error()
        return self._job.value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Its error, waited for; None where there is none. It then counts as seen."""
        self._job.wait(timeout)
        self._job.see()
        return self._job.error

    def __repr__(self) -> str:
        return f"<Future of {self._job.name}: {self._job.state()}>"


class parallel:
    """A scope whose tasks run side by side where their order does not matter.

    ``threads``: how many at once (by default one per usable core). ``synchronous``: for debugging, every task runs when
    it is given, in the caller's thread; errors surface where they would otherwise. ``memory_of``: gives the same key
    for objects that share memory, so that a write to one is a write to the other. ``parts_of``: what else is read and
    written with an object. ``version_of``: a number that every write to an object changes, or None. ``bound``: applied
    to each function in the thread that gives the task, to carry along what is that thread's own (a framework's modes).
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        synchronous: bool = False,
        memory_of: Callable[[Any], Hashable] = id,
        parts_of: Callable[[Any], Iterable[Any]] = lambda value: (),
        version_of: Callable[[Any], int | None] = lambda value: None,
        bound: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        must_be_threads(threads)
        if threads is not None and threads < 1:
            raise ValueError(f"parallel(threads={threads}): at least one thread is needed; synchronous=True uses none")
        self._threads, self._synchronous = threads, synchronous
        self._memory_of, self._parts_of, self._version_of, self._bound = memory_of, parts_of, version_of, bound
        self._jobs: dict[Job, None] = {}  # those that are not over, or have failed, and nobody has seen it
        self._crew: Crew | None = None
        self._outer: parallel | None = None

    def __enter__(self) -> parallel:
        if self._crew is not None:
            raise EngineError("this scope is open already: make another with parallel()")
        self._outer = _scope()
        if self._outer is None:
            self._crew = Crew(0 if self._synchronous else self._threads or usable_cores())
        elif self._threads is not None or self._synchronous:
            raise EngineError("an inner scope uses the threads of the outer one: write parallel() without arguments")
        else:
            outer = self._outer
            self._crew, self._bound = outer._crew, outer._bound
            self._memory_of, self._parts_of, self._version_of = outer._memory_of, outer._parts_of, outer._version_of
        _here.scope = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        crew, self._crew = self._crew, None
        _here.scope = self._outer
        assert crew is not None
        if crew.process != os.getpid():
            return
        joined = False
        try:
            if error is not None:
                crew.cancel(self._jobs, f"its scope was left by {type(error).__name__}")
            _wait_for(self._jobs)
            joined = True
        except BaseException as interrupt:
            crew.cancel(self._jobs, f"its scope was left by {type(interrupt).__name__}")
            if error is None:  # a second interrupt is not waited for
                _wait_for(self._jobs)
                joined = True
            raise
        finally:
            if self._outer is None:
                crew.close(join=joined)
        if error is None:
            settle(self._jobs)

    def _give(
        self, function: Callable[..., T], writes: tuple[Any, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Future[T]:
        crew = self._crew
        assert crew is not None
        given = (arguments, keywords)
        # A method reads its object, a module that is called its parameters.
        holder = getattr(function, "__self__", function)

        def look() -> Touched:
            reads, inputs = self._memories((given, holder))
            written, more = self._memories(writes) if writes else (set(), [])
            return Touched(reads, written, [*inputs, *more])

        bound = self._bound(function) if self._bound else function
        context = contextvars.copy_context()
        name = _name_of(function)

        def work() -> T:
            read = self._versions((given, holder), self._memories(writes)[0] if writes else set())
            value: T = context.run(_at_once, bound, given)
            if (changed := next((one for one, version in read if self._version_of(one) != version), None)) is not None:
                raise UndeclaredWrite(_undeclared(name, changed))
            return value

        job = Job(crew, name, work)
        job.stored_in = lambda value: self._memories(value)[0]
        job.really_touched = lambda: self._memories((given, holder, writes))[0]
        job.really_written = lambda: self._memories(writes)[0]
        job.unsettled = self._jobs
        crew.give(job, look)
        return Future(job)

    def _memories(self, value: Any) -> tuple[set[Hashable], list[Job]]:
        """What a value is, or may be, stored in; and the jobs whose results are in it."""
        memories: set[Hashable] = set()
        jobs: list[Job] = []
        for one in self._inside(value):
            if isinstance(one, Future):
                job = one._job
                memories.add(job)
                jobs.append(job)
            elif isinstance(one, (list, dict, set)):  # tuples cannot be written to, only what is in them
                memories.add(("object", id(one)))
            elif not isinstance(one, (tuple, frozenset)):
                memories.add(("memory", self._memory_of(one)))
        return memories, jobs

    def _versions(self, value: Any, declared: set[Hashable]) -> list[tuple[Any, int]]:
        """The versions of all objects in a value that have one, and whose memory is not declared to be written."""
        found = ((one, self._version_of(one)) for one in self._inside(value) if not isinstance(one, Future))
        return [
            (one, version)
            for one, version in found
            if version is not None and ("memory", self._memory_of(one)) not in declared
        ]

    def _inside(self, value: Any) -> Iterator[Any]:
        """A value and all that is in it, down to what is known of results that are there; plain values left out."""
        stack, seen = [value], {}
        while stack:
            one = stack.pop()
            if isinstance(one, _PLAIN) or id(one) in seen:
                continue
            seen[id(one)] = one
            yield one
            if isinstance(one, Future):
                if one._job.over:
                    stack.append(one._job.value)
            elif isinstance(one, (list, tuple, dict, set, frozenset)):
                stack.extend(one.values() if isinstance(one, dict) else one)
            else:
                stack.extend(self._parts_of(one))


def task(function: Callable[..., T], *, writes: tuple[Any, ...] = ()) -> Callable[..., Future[T]]:
    """A function whose calls are tasks: ``task(fn)(a, b)`` gives a :class:`Future`.

    Arguments may be futures, also inside lists, tuples and dicts: the function gets their results. ``writes`` are the
    objects that the call changes, as a tuple: arguments, futures, or things that the function knows from elsewhere.
    """
    if not isinstance(writes, tuple):
        raise TypeError(f"task(..., writes=...) takes a tuple: write writes=(x,), not a {type(writes).__name__}")
    for one in writes:
        if isinstance(one, _PLAIN):
            raise TypeError(f"task(..., writes=...): {one!r} cannot be written to")

    @functools.wraps(function)
    def give(*arguments: Any, **keywords: Any) -> Future[T]:
        scope = _scope()
        if scope is not None:
            return scope._give(function, writes, arguments, keywords)
        job = Job(None, _name_of(function), None)
        job.value = _at_once(function, (arguments, keywords))
        job.begun = job.over = True
        return Future(job)

    return give


def waitall() -> None:
    """Wait for all tasks of the scopes that are open in this thread; raise the first error that nobody has seen."""
    jobs: list[Job] = []
    scope = _scope()
    while scope is not None:
        jobs = [*scope._jobs, *jobs]
        scope = scope._outer
    _wait_for(jobs)
    settle(dict.fromkeys(jobs))


def no_threads(threads: int) -> str:
    """What to say where a number of threads is given for a function."""
    return (
        f"parallel(fn, threads={threads}): how many lanes a function is run on is measured, not given; leave threads "
        f"out. Tasks have threads: with parallel(threads={threads}):"
    )


# The scope that is open in this thread. A thread that does a task has none.
_here = threading.local()


@contextmanager
def at_once() -> Iterator[None]:
    """In this thread tasks are plain calls: while a function is traced, other threads would not be seen."""
    before, _here.at_once = getattr(_here, "at_once", False), True
    try:
        yield
    finally:
        _here.at_once = before


def _scope() -> parallel | None:
    scope: parallel | None = getattr(_here, "scope", None)
    if scope is None or getattr(_here, "at_once", False) or scope._crew is None or scope._crew.process != os.getpid():
        return None
    return scope


def _at_once(function: Callable[..., T], given: tuple[tuple[Any, ...], dict[str, Any]]) -> T:
    """A plain call, with results in place of futures."""
    arguments, keywords = _filled(given)
    before, _here.scope = getattr(_here, "scope", None), None
    try:
        return function(*arguments, **keywords)
    finally:
        _here.scope = before


def _filled(value: Any) -> Any:
    """Results in place of futures; what holds no future stays the object that it is."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, dict):
        filled = {key: _filled(one) for key, one in value.items()}
        return filled if any(filled[key] is not one for key, one in value.items()) else value
    if isinstance(value, (list, tuple)):
        items = [_filled(one) for one in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _wait_for(jobs: Iterable[Job]) -> None:
    for job in [*jobs]:
        job.wait(None)


def _undeclared(name: str, changed: Any) -> str:
    shape = getattr(changed, "shape", None)
    what = f"a {type(changed).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
    return (
        f"{name}: {what} that it reads was written to while it ran, and no task has declared that. Tasks that read it "
        "may have done so before or after. Where this task changes it (x.add_(1), a layer with running averages), "
        "write task(fn, writes=(x,))(x); where other code does, let it wait with result() or waitall() first"
    )


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
