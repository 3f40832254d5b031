"""What a task touches: the tensors among its arguments, and the containers and modules that hold them.

Containers (lists, tuples, dicts, sets, deques, ``ChainMap``, ``UserDict``, dataclasses, partial functions) are looked
into, and so is what the framework knows the parts of. A method's object
counts as an argument, and so does the function itself, which may be a module. Everything else is known by its identity:
what it has as attributes, closures or globals is not looked at.

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
from collections.abc import Callable, Collection, Hashable, Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.addresses import Held, content, is_array, share, span_of
from manyhands.tasks.future import Future

if TYPE_CHECKING:
    from manyhands.tasks.job import Job

# Immutable values, and classes.
PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice, enum.Enum, type(...), types.ModuleType, type)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_WHOLE, _BLOCKS = 1 << 20, 256  # arrays up to this size are compared whole, larger ones in so many blocks


@dataclass(frozen=True, slots=True)
class Hooks:
    """The answers of a framework; by default those for Python's own objects.

    Attributes:
        memory_of: The same key for objects that share memory, or a :class:`~manyhands.addresses.Span`: then a write to
            one is a write to the other.
        parts_of: What else is read and written with an object (a module: its parameters); None: it is not the
            framework's.
        version_of: Something that every write to one of the framework's objects changes; None: that is not known.
        bound: Applied to each function in the thread that submits the task, to carry over that thread's state (a
            framework's modes).
        exclusive: Those of the framework's objects that change inside when they are only used (a block that is traced
            at its first call): tasks that share one run one after the other, in any order.
    """

    memory_of: Callable[[object], Hashable] = id
    parts_of: Callable[[object], Collection[object] | None] = lambda value: None
    version_of: Callable[[object], object] = lambda value: None
    bound: Callable[[Callable[..., object]], Callable[..., object]] = lambda function: function
    exclusive: Callable[[list[object]], Collection[object]] = lambda objects: ()


@dataclass(slots=True, eq=False)
class Touched:
    """What some values consist of."""

    memories: set[Hashable] = field(default_factory=set)  # that the values are in, or may be in
    inputs: list[Job] = field(default_factory=list)  # whose results are among the values
    arrays: list[object] = field(default_factory=list)  # NumPy's, and buffers
    objects: list[object] = field(default_factory=list)  # the framework's
    containers: list[object] = field(default_factory=list)  # that can be changed
    exclusive: Collection[object] = ()  # objects that only one task at a time may use
    fixed: bool = True  # whether the values will always consist of the same ones


def look(hooks: Hooks, *values: object) -> Touched:
    """What these values consist of, including results that are known."""
    touched, stack, seen = Touched(), [*values], dict[int, object]()
    while stack:
        value = stack.pop()
        if not isinstance(value, PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            stack.extend(_parts(hooks, value, touched))
    if touched.objects:
        touched.exclusive = hooks.exclusive(touched.objects)
    return touched


def _parts(hooks: Hooks, value: object, touched: Touched) -> Iterable[object]:
    """Note a value; returns the values in it."""
    if isinstance(value, types.FunctionType):
        touched.memories.add(id(value))
        return ()
    if (parts := hooks.parts_of(value)) is not None:
        touched.fixed = touched.fixed and not parts
        touched.memories.add(hooks.memory_of(value))
        touched.objects.append(value)
        return parts
    if isinstance(value, _METHODS):
        return (value.__self__,)
    if isinstance(value, Future):
        touched.fixed = False
        touched.memories.add(value._job)
        touched.inputs.append(value._job)
        return (value._job.value,) if value._job.over else ()
    if is_array(value):
        touched.fixed = False  # a bytearray that grows moves
        touched.arrays.append(value)
        touched.memories |= {hooks.memory_of(value), _memory_of(value)}
        return ()
    if (inside := contents(value)) is None:
        touched.memories.add(hooks.memory_of(value))
        return ()
    if not isinstance(value, (tuple, frozenset)):
        touched.fixed = False
        touched.memories.add(id(value))
        touched.containers.append(value)
    return inside


class Watch:
    """The state of a task's arguments before it starts, except what it declares to write.

    The framework's objects are compared by what the framework says of them, NumPy arrays and buffers by their content,
    containers by the objects that they hold.
    """

    def __init__(self, hooks: Hooks, touched: Touched, written: Set[Hashable]) -> None:
        kinds: tuple[tuple[list[object], Callable[[object], Hashable], Callable[[object], object]], ...] = (
            (touched.objects, hooks.memory_of, hooks.version_of),
            (touched.arrays, _memory_of, _content_of),
            (touched.containers, id, _held_by),
        )
        self._before = [
            (value, state_of, state)
            for values, memory_of, state_of in kinds
            for value in values
            if not (written and share([memory_of(value)], written)) and (state := state_of(value)) is not None
        ]

    def changed(self) -> object:
        """The first argument that has changed, or None."""
        return next((value for value, state_of, before in self._before if state_of(value) != before), None)


def _memory_of(array: object) -> Hashable:
    return span_of(array) or id(array)


def _content_of(array: object) -> object:
    """The address and content of a NumPy array or a buffer; None if it cannot be written to."""
    span = span_of(array)
    return None if span is None else (span, content(span, _WHOLE, _BLOCKS))


def _held_by(container: object) -> Held:
    return Held([*(container if isinstance(container, dict) else ()), *(contents(container) or ())])


def in_words(changed: object) -> str:
    """What has changed, for an error."""
    shape = getattr(changed, "shape", None)
    name = type(changed).__name__
    article = "an" if name[0] in "aeioAEIO" or name in ("NDArray", "ndarray") else "a"
    return f"{article} {name}" + ("" if shape is None else f" of shape {tuple(shape)}")


def contents(value: object) -> list[object] | None:
    """The values inside a container; None if the value is not a container."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, ChainMap):
        return list(value.maps)
    if isinstance(value, UserDict):  # as the batches of tokenizers are
        return [value.data]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if (names := _fields(value)) is not None:
        return [getattr(value, name) for name in names]
    return None


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
    return _rebuilt(value, parts)


def _rebuilt(value: object, parts: list[object]) -> object:
    """A value like this one, made of these parts."""
    if isinstance(value, tuple):
        rebuilt: Any = tuple.__new__(type(value), parts)
        if attributes := getattr(value, "__dict__", None):
            vars(rebuilt).update(attributes)
        return rebuilt
    if isinstance(value, frozenset):
        return type(value)(parts)
    if isinstance(value, functools.partial):
        function: Any
        function, *rest = parts
        count = len(value.args)
        return type(value)(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))
    rebuilt = copy.copy(value)
    if isinstance(value, dict):
        dict.update(rebuilt, zip(value, parts, strict=True))
    elif isinstance(value, (list, deque)):
        for number, part in enumerate(parts):
            rebuilt[number] = part
    elif isinstance(value, set):
        rebuilt.clear()
        rebuilt.update(parts)
    elif isinstance(value, ChainMap):
        rebuilt.maps = parts
    elif isinstance(value, UserDict):
        (rebuilt.data,) = parts
    else:
        for name, part in zip(_fields(value) or (), parts, strict=True):
            object.__setattr__(rebuilt, name, part)  # also where it is frozen
    return rebuilt


def _fields(value: object) -> list[str] | None:
    """The names of a dataclass's fields that are there."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
