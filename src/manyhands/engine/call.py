"""The call that a task makes: what it reads and writes, as far as that is known, and how it is done.

A call is looked through when its task is given, so that it is known behind whom it has to go. Much of it can be
different when it begins: a result is there that was not, a list has another item, a module another parameter. So it is
looked through again then, unless all that was found is what it always will be. In ``task(scale)(x, 2)`` a tensor ``x``
is found, and that is that; in ``task(scale)([x], 2)`` somebody may put another tensor into the list first.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from manyhands.engine import contents
from manyhands.engine.job import NOTHING, Job, Touched
from manyhands.errors import UndeclaredWrite

if TYPE_CHECKING:
    from manyhands.engine.crew import Crew
    from manyhands.engine.futures import parallel

T = TypeVar("T")
Function = Callable[..., Any]

PLAIN = (int, float, complex, str, bytes, bool, type(None), type, range, slice)  # nobody can write to them
_PLAIN, _LEAF, _FUNCTION, _FUTURE, _CHANGEABLE, _FIXED, _COMPOSED = range(7)


class Here(threading.local):
    """What is so in this thread."""

    scope: parallel | None = None  # that is open; a thread that does a task has none
    at_once = False  # whether tasks are plain calls


here = Here()


class Future(Generic[T]):
    """The result of a task that may still be running."""

    __slots__ = ("__weakref__", "_job")

    def __init__(self, job: Job) -> None:
        self._job = job

    def done(self) -> bool:
        """Whether it is over: it has a result, an error, or was cancelled."""
        return self._job.over

    def result(self, timeout: float | None = None) -> T:
        """Its result, waited for; raises the task's error, or ``TimeoutError`` after ``timeout`` seconds."""
        job = self._job
        if not job.over:
            job.wait(timeout)
        if job.error is not None:
            job.raise_error()
        return job.value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Its error, waited for; None where there is none. It then counts as seen."""
        self._job.wait(timeout)
        self._job.see()
        return self._job.error

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is not its result, and neither true nor false: write .result()")

    def __repr__(self) -> str:
        return f"<Future of {self._job.name}: {self._job.state()}>"


# What is in some values: the memories they are, or may be, in; the jobs whose results are among them; the objects that
# are nothing but themselves; and whether all that will ever be in them was found.
Found = tuple[Set[Hashable], list[Job], list[Any], bool]


class Objects:
    """What is known of objects: see :class:`manyhands.engine.futures.parallel`, which is told by the framework."""

    def __init__(
        self,
        memory_of: Callable[[Any], Hashable],
        parts_of: Callable[[Any], Collection[Any]],
        version_of: Callable[[Any], Hashable | None] | None,
        bound: Callable[[Function], Function] | None,
    ) -> None:
        self.memory_of, self.parts_of, self.version_of, self.bound = memory_of, parts_of, version_of, bound
        self._kinds: dict[type, int] = {}  # of the classes that were seen

    def look(self, *values: Any) -> Found:
        """All that is in these values, down to what is known of results that are there; plain values left out."""
        memories: set[Hashable] = set()
        inputs: list[Job] = []
        objects: list[Any] = []
        kinds, memory_of, parts_of = self._kinds, self.memory_of, self.parts_of
        seen: dict[int, Any] = {}
        stack, for_good = [*values], True
        while stack:
            one = stack.pop()
            cls = type(one)
            kind = kinds[cls] if cls in kinds else self._kind(cls)
            if kind == _PLAIN:
                continue
            if kind == _FUNCTION:  # no framework has anything to say of it
                memories.add(id(one))
            elif kind == _LEAF:
                memories.add(memory_of(one))
                objects.append(one)
                if (parts := parts_of(one)) and id(one) not in seen:
                    seen[id(one)], for_good = one, False
                    stack.extend(parts)
            elif id(one) not in seen:
                seen[id(one)] = one
                if kind == _FUTURE:
                    for_good = False
                    memories.add(one._job)
                    inputs.append(one._job)
                    if one._job.over:
                        stack.append(one._job.value)
                else:
                    if kind != _FIXED:  # that cannot be written to, only what is in it
                        for_good = False
                        memories.add(id(one))
                    stack.extend(contents.contents(one) or ())
                    if kind == _COMPOSED:  # a framework may have more to say of it
                        stack.extend(parts_of(one))
        return memories, inputs, objects, for_good

    def _kind(self, cls: type) -> int:
        kind = next(kind for kind, classes in _KINDS if issubclass(cls, classes))
        self._kinds[cls] = _COMPOSED if kind == _LEAF and dataclasses.is_dataclass(cls) else kind
        return self._kinds[cls]


_KINDS: tuple[tuple[int, tuple[type, ...]], ...] = (
    (_PLAIN, PLAIN),
    (_FUTURE, (Future,)),
    (_CHANGEABLE, (list, dict, set)),
    (_FIXED, (tuple, frozenset)),
    (_COMPOSED, (functools.partial,)),
    (_FUNCTION, (FunctionType,)),
    (_LEAF, (object,)),
)


class Call(Job):
    """A call of a function that is a task; what it was given is let go of when it is over."""

    __slots__ = ("_arguments", "_context", "_done_by", "_function", "_keywords", "_known", "_objects", "_writes")

    def __init__(
        self,
        crew: Crew,
        unsettled: dict[Job, None],
        objects: Objects,
        function: Function,
        writes: tuple[Any, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        super().__init__(crew, name_of(function), unsettled)
        self._objects, self._function, self._writes = objects, function, writes
        self._arguments, self._keywords = arguments, keywords
        self._done_by = objects.bound(function) if objects.bound else function
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._known: Sequence[Any] | None = None  # the objects in what it reads, where that is all there will be

    def look(self) -> Touched:
        reads, inputs, objects, for_good = self._read()
        self._known = (objects or ()) if for_good else None
        if not self._writes:
            return reads, NOTHING, inputs
        writes, more, _, _ = self._objects.look(*self._writes)
        return reads, writes, inputs + more

    def stored_in(self, value: Any) -> Set[Hashable]:
        return self._objects.look(value)[0]

    def really_touched(self) -> Set[Hashable]:
        return self._read()[0] | self.really_written()

    def really_written(self) -> Set[Hashable]:
        return self._objects.look(*self._writes)[0] if self._writes else NOTHING

    def let_go(self) -> None:
        self._done_by = self._function = _nothing
        self._arguments, self._keywords, self._writes = (), {}, ()
        self._context = self._known = None

    def work(self) -> Any:
        known, arguments, keywords = self._known, self._arguments, self._keywords
        if known is None:
            known = self._read()[2]
            arguments, keywords = filled(arguments), filled(keywords)
        versions = self._versions(known) if self._objects.version_of else ()
        assert self._context is not None
        value = self._context.run(call_at_once, self._done_by, arguments, keywords)
        for one, version in versions:
            if self._objects.version_of(one) != version:  # type: ignore[misc]
                raise UndeclaredWrite(_undeclared(self.name, one))
        return value

    def _read(self) -> Found:
        # A method reads its object, a module that is called its parameters.
        holder = getattr(self._function, "__self__", self._function)
        return self._objects.look(holder, *self._arguments, *self._keywords.values())

    def _versions(self, known: Iterable[Any]) -> list[tuple[Any, Hashable]]:
        """The versions of all objects that have one, and whose memory is not declared to be written."""
        memory_of, version_of, written = self._objects.memory_of, self._objects.version_of, self.really_written()
        assert version_of is not None
        found = [(one, version) for one in known if (version := version_of(one)) is not None]
        return [both for both in found if memory_of(both[0]) not in written] if written else found


def _nothing() -> None:
    """What a call that is over would do."""


def call_at_once(function: Callable[..., T], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> T:
    """A plain call, in which tasks are plain calls as well."""
    before, here.scope = here.scope, None
    try:
        return function(*arguments, **keywords)
    finally:
        here.scope = before


def filled(value: Any) -> Any:
    """Results in place of futures; what holds no future stays the object that it is."""
    return contents.filled(value, lambda one: one.result() if isinstance(one, Future) else one)


def name_of(function: Function) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _undeclared(name: str, changed: Any) -> str:
    shape = getattr(changed, "shape", None)
    what = f"a {type(changed).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
    return (
        f"{name}: {what} that it reads was written to while it ran, and no task has declared that. Tasks that read it "
        "may have done so before or after. Where this task changes it (x.add_(1), a layer with running averages, "
        "loss.backward() its gradient), write task(fn, writes=(x,))(x); where other code does, let it wait with "
        "result() or waitall() first"
    )
