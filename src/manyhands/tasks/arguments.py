"""What a task touches: the tensors among its arguments, and the containers and modules that hold them.

Containers (lists, tuples, dicts, sets, deques, ``ChainMap``, ``UserDict``, dataclasses, partial functions) are looked
into, and so is what the framework knows the parts of. A method's object counts as an argument, and so does the function
itself, which may be a module, and the result of another task (:class:`Future`). Everything else is known by its
identity: what it has as attributes, closures or globals is not looked at.

::

    task(table.add_)(rows[0])              # reads ``table`` and the row
    task(train)(net, {"x": x, "y": y})     # reads the dict, both tensors, and the parameters of ``net``
    task(lambda: table.sum())()            # reads nothing: write task(torch.sum)(table)
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from manyhands.addresses import Held, content, is_array, share, span_of

if TYPE_CHECKING:
    from manyhands.tasks.job import TaskCall

T = TypeVar("T")
# Immutable values, and classes.
PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice, enum.Enum, type(...), types.ModuleType, type)
_WHOLE, _BLOCKS = 1 << 20, 256  # arrays up to this size are compared whole, larger ones in so many blocks


class Future(Generic[T]):
    """The result of a task that may still be running."""

    __slots__ = ("__weakref__", "_job")

    def __init__(self, job: TaskCall) -> None:
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


@dataclass(frozen=True, slots=True)
class FrameworkHooks:
    """The answers of a framework; by default those for Python's own objects.

    Attributes:
        memory_of: The same key for objects that share memory, or an :class:`~manyhands.addresses.AddressRange`: then a
            write to one is a write to the other.
        parts_of: What else is read and written with an object (a module: its parameters); None: it is not the
            framework's.
        version_of: Something that every write to one of the framework's objects changes; None: that is not known.
        bound: Applied to each function in the thread that submits the task, to carry over that thread's state (a
            framework's modes).
        exclusive: Those of the framework's objects that change inside when they are only used (a block that is traced
            at its first call): tasks that share one run one after the other.
    """

    memory_of: Callable[[object], Hashable] = id
    parts_of: Callable[[object], Collection[object] | None] = lambda value: None
    version_of: Callable[[object], object] = lambda value: None
    bound: Callable[[Callable[..., object]], Callable[..., object]] = lambda function: function
    exclusive: Callable[[list[object]], Collection[object]] = lambda objects: ()

    @classmethod
    def of(cls, module: object) -> FrameworkHooks:
        """The functions of these names in a framework's module."""
        return cls(**{name: answer for name, answer in vars(module).items() if name in cls.__slots__})


@dataclass(slots=True, eq=False)
class Touched:
    """What some values consist of."""

    memories: set[Hashable] = field(default_factory=set)  # that the values are in, or may be in
    inputs: list[TaskCall] = field(default_factory=list)  # whose results are among the values
    objects: list[object] = field(default_factory=list)  # the framework's
    # What can change: each with its memory and what its state is asked of.
    changing: list[tuple[object, Hashable, Callable[..., object]]] = field(default_factory=list)
    exclusive: Set[Hashable] = frozenset()  # the objects that only one task at a time may use


def look(hooks: FrameworkHooks, *values: object) -> Touched:
    """What these values consist of, including results that are known."""
    touched, stack, seen = Touched(), [*values], dict[int, object]()
    while stack:
        value = stack.pop()
        if not isinstance(value, PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            stack.extend(_parts(hooks, value, touched))
    touched.exclusive = {("exclusive", id(value)) for value in hooks.exclusive(touched.objects)}
    return touched


def _parts(hooks: FrameworkHooks, value: object, touched: Touched) -> Iterable[object]:
    """Note a value; returns the values in it."""
    if (parts := hooks.parts_of(value)) is not None:
        memory = hooks.memory_of(value)
        touched.memories.add(memory)
        touched.objects.append(value)
        touched.changing.append((value, memory, hooks.version_of))
        return parts
    if isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        return (value.__self__,)
    if isinstance(value, Future):
        touched.memories.add(value._job)
        touched.inputs.append(value._job)
        return (value._job.value,) if value._job.over else ()
    if is_array(value):
        memory = span_of(value) or id(value)
        touched.memories |= {hooks.memory_of(value), memory}
        touched.changing.append((value, memory, _content_of))
        return ()
    if (inside := contents(value)) is None:
        touched.memories.add(hooks.memory_of(value))
        return ()
    if not isinstance(value, (tuple, frozenset)):
        touched.memories.add(id(value))
        touched.changing.append((value, id(value), _held_by))
    return inside


def states(touched: Touched, written: Set[Hashable]) -> list[tuple[object, Callable[..., object], object]]:
    """The state of a task's arguments before it starts, except of what it declares to write.

    The framework's objects are compared by what the framework says of them, NumPy arrays and buffers by their content,
    containers by the objects that they hold.
    """
    return [
        (value, state_of, state)
        for value, memory, state_of in touched.changing
        if not (written and share([memory], written)) and (state := state_of(value)) is not None
    ]


def _content_of(array: object) -> object:
    """The address and content of a NumPy array or a buffer; None if it cannot be written to."""
    span = span_of(array)
    return None if span is None else (span, content(span, _WHOLE, _BLOCKS))


def _held_by(container: object) -> Held:
    return Held([*(container if isinstance(container, dict) else ()), *(contents(container) or ())])


def contents(value: object) -> list[object] | None:
    """The values inside a container; None if the value is not a container."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    return None if (names := _fields(value)) is None else [getattr(value, name) for name in names]


def _fields(value: object) -> Sequence[str] | None:
    """The attributes that hold what is in an object; None if it is not a container."""
    if isinstance(value, functools.partial):
        return "func", "args", "keywords"
    if isinstance(value, ChainMap):
        return ("maps",)
    if isinstance(value, UserDict):  # as the batches of tokenizers are
        return ("data",)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def replace_parts(value: object, replacement: Callable[[object], object]) -> object:
    """The value with a replacement for each value inside; the same object where nothing is replaced.

    A subclass (``OrderedDict``, ``defaultdict``, a named tuple, a user's class) is kept.
    """
    inside = contents(value)
    if inside is None:
        return replacement(value)
    parts = [replace_parts(part, replacement) for part in inside]
    if all(new is old for new, old in zip(parts, inside, strict=True)):
        return value
    rebuilt: Any
    if isinstance(value, functools.partial):
        function, arguments, keywords = cast(Any, parts)
        return type(value)(function, *arguments, **keywords)
    if isinstance(value, (tuple, frozenset)):
        base: Any = tuple if isinstance(value, tuple) else frozenset
        rebuilt = base.__new__(type(value), parts)
        if attributes := getattr(value, "__dict__", None):
            vars(rebuilt).update(attributes)
        return rebuilt
    rebuilt = copy.copy(value)
    if isinstance(value, dict):
        dict.update(rebuilt, zip(value, parts, strict=True))
    elif isinstance(value, (list, deque, set)):
        rebuilt.clear()
        rebuilt.update(parts) if isinstance(value, set) else rebuilt.extend(parts)
    else:
        for name, part in zip(_fields(value) or (), parts, strict=True):
            object.__setattr__(rebuilt, name, part)  # also where it is frozen
    return rebuilt
