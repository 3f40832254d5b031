"""The call that a task makes: what it reads and writes, as far as that is known, and how it is run.

A call is examined when its task is submitted, to know which tasks it must follow. Much may have changed when it starts:
a result is known, a list has another item, a module has another parameter. So it is examined again then, unless
everything in it is immutable. ``task(scale)(x, 2)`` is examined once; in ``task(scale)([x], 2)`` other code may put
another tensor into the list first.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakValueDictionary

from manyhands.errors import UndeclaredWrite
from manyhands.tasks import containers
from manyhands.tasks.job import NOTHING, Future, Job, Touched
from manyhands.tasks.reachable import Objects, Reached, Variable
from manyhands.tasks.undeclared_writes import Watch, in_words

if TYPE_CHECKING:
    from manyhands.tasks.scope import parallel
    from manyhands.tasks.workers import WorkerPool

T = TypeVar("T")
Function = Callable[..., object]


class ThreadState(threading.local):
    """The state of this thread."""

    scope: parallel | None = None  # the open scope; None in a thread that runs a task
    inline_tasks = False  # whether tasks are plain calls


thread_state = ThreadState()


class Call(Job):
    """A call of a function that is a task; its arguments are released when it is done."""

    __slots__ = ("_arguments", "_context", "_done_by", "_function", "_keywords", "_objects", "_reached", "_writes")

    def __init__(
        self,
        workers: WorkerPool,
        unsettled: dict[Job, None],
        objects: Objects,
        function: Function,
        writes: tuple[object, ...],
        arguments: tuple[object, ...],
        keywords: dict[str, object],
    ) -> None:
        super().__init__(workers, name_of(function), unsettled)
        self._objects, self._function, self._writes = objects, function, writes
        self._arguments, self._keywords = arguments, keywords
        self._done_by = objects.hooks.bound(function) if objects.hooks.bound else function
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._reached: Reached | None = None  # what it reads, known when it was submitted

    def look(self) -> Touched:
        reached = self._reached = self._read()
        if not self._writes:
            return reached.memories, NOTHING, reached.inputs, reached.futures
        written = self._objects.look(*self._writes)
        self._objects.rebound.update(variable.key() for variable in written.variables)
        return reached.memories, written.memories, reached.inputs + written.inputs, reached.futures + written.futures

    def stored_in(self, value: object) -> Set[Hashable]:
        return self._objects.look(value).memories

    def accessed(self) -> Set[Hashable]:
        return self._read().memories | self.written_memories()

    def written_memories(self) -> Set[Hashable]:
        return self._objects.look(*self._writes).memories if self._writes else NOTHING

    def release(self) -> None:
        self._done_by = self._function = _nothing
        self._arguments, self._keywords, self._writes = (), {}, ()
        self._context = self._reached = None

    def work(self) -> object:
        reached, arguments, keywords = self._reached, self._arguments, self._keywords
        assert reached is not None
        self._check_variables(reached)
        if not reached.for_good or self._objects.rebound:
            reached = self._read()
            if reached.inputs:
                arguments, keywords = filled(arguments), filled(keywords)
        if not reached.exclusive:
            return self._watched(reached, arguments, keywords)
        with _exclusive(reached.exclusive):
            return self._watched(self._read(), arguments, keywords)

    def _watched(self, reached: Reached, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        watch = Watch(self._objects, reached, self.written_memories())
        assert self._context is not None
        value = self._context.run(call_at_once, self._done_by, arguments, keywords)
        if (changed := watch.changed()) is not None:
            raise UndeclaredWrite(_undeclared(self.name, changed))
        return value

    def _read(self) -> Reached:
        return self._objects.look(self._function, *self._arguments, *self._keywords.values())

    def _check_variables(self, reached: Reached) -> None:
        """Refuse a variable of the function that was assigned since the task was submitted."""
        for variable in reached.variables:
            if not variable.is_bound() and not reached.locks and variable.key() not in self._objects.rebound:
                raise UndeclaredWrite(_rebound(self.name, variable.name))


# A lock for each object that a task waits for or uses.
_turns: WeakValueDictionary[int, threading.RLock] = WeakValueDictionary()
_turns_lock = threading.Lock()


@contextmanager
def _exclusive(objects: Collection[object]) -> Iterator[None]:
    """While no other task uses one of these objects."""
    with _turns_lock:
        locks = [
            _turns.setdefault(identity, threading.RLock()) for identity in sorted({id(value) for value in objects})
        ]
    with ExitStack() as stack:
        for lock in locks:  # all tasks take them in the same order
            stack.enter_context(lock)
        yield


def _nothing() -> None:
    """Stands in for the function of a call that is over."""


def call_at_once(function: Callable[..., T], arguments: tuple[object, ...], keywords: dict[str, object]) -> T:
    """A plain call, in which tasks are plain calls as well."""
    before, thread_state.scope = thread_state.scope, None
    try:
        return function(*arguments, **keywords)
    finally:
        thread_state.scope = before


def filled(value: T) -> T:
    """The value with results in place of futures; the same object if there is no future in it."""
    return cast(
        T,
        containers.filled(value, lambda part: part.result() if isinstance(part, Future) else part),
    )


def name_of(function: Function) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _undeclared(name: str, changed: object) -> str:
    if isinstance(changed, Variable):
        return (
            f"{name}: the variable {changed.name!r} that it looks up was assigned while it ran, and no task has "
            f"declared that. Where the task does it (nonlocal {changed.name}), write task(fn, writes=(fn,)); where "
            f"other code does, give the value: task(fn)({changed.name}), or lambda {changed.name}={changed.name}: ..."
        )
    shown = in_words(changed)
    return (
        f"{name}: {shown} that it reads was written to while it ran, and no task has declared that. Tasks that read it "
        "may have done so before or after. Where this task changes it (in place, by a layer with running averages, by "
        "a backward pass that fills its gradient), write task(fn, writes=(x,))(x); where other code does, let it wait "
        "with result() or waitall() first"
    )


def _rebound(name: str, variable: str) -> str:
    return (
        f"{name}: the variable {variable!r} that it looks up was assigned between the task's submission and its start: "
        f"it would get another value than a plain call. Pass the value as an argument: task(fn)({variable}), or "
        f"as a default, lambda {variable}={variable}: ..."
    )
