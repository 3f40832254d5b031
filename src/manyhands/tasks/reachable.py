"""Finds what a task can touch: everything that its function and its arguments lead to.

There are two steps. First the arguments: the contents of lists, tuples, dicts, sets, deques, ``ChainMap``, dataclasses
and partial functions, and the futures among them, whose results the task takes. Then what functions and objects lead
to: a function to the variables it closes over, its default values, and the globals its code names; a method to its
object; an object and a class to the attributes and methods that the code names. Of an object's other attributes only
arrays are followed: in ``self.futures.append(task(self.step)(x))`` the task does not reach ``futures``, unless the code
of ``step`` names it.

::

    table, log = torch.zeros(3), []
    def count(row, store): table[row] += 1; store.note(row)     # reaches ``table``, ``store`` and what ``note`` names

Of functions and classes of installed packages only closures and defaults are followed, not what their code names, and
of objects of such classes only the arrays among their attributes. What C code holds is not reached.
"""

from __future__ import annotations

import array
import dataclasses
import enum
import functools
import sys
import threading
import types
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Never, TypeAlias, cast

from manyhands.addresses import span_of_array, span_of_buffer
from manyhands.python_code.names import function_behind, globals_of, is_foreign, slots_of, words_of
from manyhands.tasks import containers
from manyhands.tasks.hooks import Hooks
from manyhands.tasks.job import Future, Job

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Immutable values.
PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice, enum.Enum, type(...), types.ModuleType)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_LOCKS = (*_LOCKS, threading.Semaphore, threading.Barrier)
BUFFERS = (bytearray, memoryview, array.array)
_HOLDERS = (types.SimpleNamespace, Namespace, UserDict, UserList)  # Python's own, but what is in them is the user's
_MAKING = frozenset({"__new__", "__init__", "__post_init__"})  # what calling a class calls
_CALLED = frozenset({"forward", "call", "hybrid_forward", "training_step"})  # by frameworks, not by the user's code
_CODE = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
_ANY = {"getattr", "setattr", "delattr", "vars", "__dict__", "asdict", "astuple", "deepcopy"}  # may name any attribute

_MISSING = object()


class Variable(NamedTuple):
    """A cell of a closure, a name among globals or of a class, and what it names."""

    holder: dict[str, object] | type | types.CellType
    name: str
    value: object

    def key(self) -> Hashable:
        return (id(self.holder), self.name) if isinstance(self.holder, dict) else id(self.holder)

    def is_bound(self) -> bool:
        """Whether it still names that."""
        if isinstance(self.holder, (dict, type)):
            names = self.holder if isinstance(self.holder, dict) else vars(self.holder)
            return names.get(self.name, _MISSING) is self.value
        try:
            return self.holder.cell_contents is self.value
        except ValueError:
            return False


@dataclasses.dataclass(slots=True, eq=False)
class Reached:
    """What some values lead to."""

    memories: set[Hashable] = dataclasses.field(default_factory=set)  # that the values are in, or may be in
    inputs: list[Job] = dataclasses.field(default_factory=list)  # whose results are among the arguments
    futures: list[Job] = dataclasses.field(default_factory=list)  # whose futures a function or an object holds
    arrays: list[object] = dataclasses.field(default_factory=list)  # NumPy's, and buffers
    objects: list[object] = dataclasses.field(default_factory=list)  # that the framework is asked about
    holders: list[object] = dataclasses.field(default_factory=list)  # Python's containers and the user's objects
    variables: list[Variable] = dataclasses.field(default_factory=list)
    helpers: list[Variable] = dataclasses.field(default_factory=list)  # globals that name code, and what classes have
    exclusive: Collection[object] = ()  # objects that only one task at a time may use
    locks: bool = False  # whether a lock, or something like it, is among them
    words: set[str] | None = None  # the names of attributes that are looked up; None: perhaps all
    for_good: bool = True  # whether nothing can be added later, as long as the variables stay bound


class _Walk:
    """The state of one walk."""

    __slots__ = ("classes", "followed", "later", "owners", "reached", "seen", "stack", "words")

    def __init__(self, values: Iterable[object]) -> None:
        self.reached = Reached()
        self.stack = [*values]  # to be looked at
        self.later: list[object] = []  # what functions and objects lead to: examined after the arguments
        self.seen: dict[int, object] = {}
        self.classes: dict[type, bool] = {}  # user classes whose methods may be called; True: the class, too
        self.owners: list[object] = []  # the user's objects
        self.followed: set[tuple[int, str, bool]] = set()  # attributes of these, wholly or for arrays
        self.words: set[str] = set()  # names in the user's code


_Kind: TypeAlias = "Callable[[Objects, object, _Walk], None]"


class Objects:
    """What the framework tells about objects, and what values lead to."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.rebound: set[Hashable] = set()  # variables that some task has declared to write
        self._kinds: dict[type, _Kind | None] = {}

    def look(self, *values: object) -> Reached:
        """Everything that these values lead to, including results that are known, without plain values."""
        walk = _Walk(values)
        self._through(walk)
        reached = walk.reached
        if walk.later or walk.owners or walk.classes:
            inputs, reached.inputs = reached.inputs, reached.futures
            while walk.later or self._has_more(walk):
                walk.stack, walk.later = walk.later, []
                self._through(walk)
            reached.inputs, reached.futures = inputs, reached.inputs
        if self.hooks.exclusive is not None:
            reached.exclusive = self.hooks.exclusive(reached.objects, walk.words)
        return reached

    def _has_more(self, walk: _Walk) -> bool:
        """Queue the methods and attributes that the code names; returns whether there are more."""
        if not walk.classes:
            return False
        reached, words = walk.reached, walk.words
        reached.words = words if words and words.isdisjoint(_ANY) else None
        for owner in walk.owners:
            for name, value in attributes(owner):
                wholly = reached.words is None or name in words
                if (mark := (id(owner), name, wholly)) not in walk.followed:
                    walk.followed.add(mark)
                    walk.later.extend([value] if wholly else self._arrays_in(value))
        walk.later.extend(_methods(walk))
        self._class_attributes(walk)
        return bool(walk.later)

    def _class_attributes(self, walk: _Walk) -> None:
        """What the code names of the classes themselves: ``class Totals: table = zeros(3)``, ``Totals.table``."""
        for cls in walk.classes:
            for owner in cls.__mro__:
                names = () if is_foreign(owner) else walk.words & vars(owner).keys()
                for name in names:
                    value = vars(owner)[name]
                    if (mark := (id(owner), name, True)) in walk.followed:
                        continue
                    walk.followed.add(mark)
                    walk.reached.helpers.append(Variable(owner, name, value))
                    if not isinstance(value, _CODE):
                        walk.reached.for_good = False
                        walk.later.append(value)

    def _through(self, walk: _Walk) -> None:
        stack, seen, kinds = walk.stack, walk.seen, self._kinds
        while stack:
            value = stack.pop()
            cls = type(value)
            handle = kinds[cls] if cls in kinds else self._kind(cls)
            if handle is not None and id(value) not in seen:
                seen[id(value)] = value
                handle(self, value, walk)

    def _kind(self, cls: type) -> _Kind | None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(cls, numpy.ndarray):
            kind: object = Objects._array
        elif numpy is not None and issubclass(cls, numpy.generic):
            kind = None
        else:
            kind = next(handle for classes, handle in _KINDS if issubclass(cls, classes))
        if kind is Objects._foreign:
            if dataclasses.is_dataclass(cls):
                kind = Objects._dataclass
            elif not is_foreign(cls) or issubclass(cls, _HOLDERS):
                kind = Objects._object
        self._kinds[cls] = handle = cast("_Kind | None", kind)
        return handle

    # One for each kind of value

    def _future(self, future: Future[object], walk: _Walk) -> None:
        walk.reached.for_good = False
        walk.reached.memories.add(future._job)
        walk.reached.inputs.append(future._job)
        if future._job.over:
            walk.stack.append(future._job.value)

    def _changeable(self, container: dict[object, object] | Iterable[object], walk: _Walk) -> None:
        walk.reached.for_good = False
        walk.reached.memories.add(id(container))
        walk.reached.holders.append(container)
        walk.stack.extend(container.values() if isinstance(container, dict) else container)
        if type(container) not in (list, dict, set, deque):
            if not is_foreign(type(container)):
                walk.classes.setdefault(type(container), False)
            walk.later.extend(value for _, value in attributes(container))

    def _fixed(self, container: Iterable[object], walk: _Walk) -> None:
        walk.stack.extend(container)

    def _partial(self, partial: object, walk: _Walk) -> None:
        walk.reached.memories.add(id(partial))
        walk.stack.extend(containers.contents(partial) or ())

    def _dataclass(self, instance: object, walk: _Walk) -> None:
        walk.stack.extend(containers.contents(instance) or ())
        self._object(instance, walk)

    def _chain(self, chain: ChainMap[object, object], walk: _Walk) -> None:
        walk.stack.extend(chain.maps)
        self._object(chain, walk)

    def _array(self, array: NDArray[np.generic], walk: _Walk) -> None:
        reached = walk.reached
        reached.arrays.append(array)
        reached.memories.add(span_of_array(array) or id(array))
        if array.dtype.hasobject:
            reached.for_good = False
            walk.later.extend(array.ravel().tolist())

    def _buffer(self, buffer: object, walk: _Walk) -> None:
        walk.reached.arrays.append(buffer)
        walk.reached.memories.add(self.hooks.memory_of(buffer))
        if (span := span_of_buffer(buffer)) is not None:
            walk.reached.for_good = False  # a bytearray that grows moves
            walk.reached.memories.add(span)

    def _lock(self, lock: object, walk: _Walk) -> None:
        walk.reached.locks = True
        walk.reached.memories.add(id(lock))

    def _class(self, cls: type, walk: _Walk) -> None:
        if not is_foreign(cls):
            walk.classes[cls] = True

    def _method(self, method: types.MethodType, walk: _Walk) -> None:
        walk.later.append(method.__self__)
        if (function := getattr(method, "__func__", None)) is not None:
            walk.later.append(function)

    def _function(self, function: types.FunctionType, walk: _Walk) -> None:
        reached, later = walk.reached, walk.later
        reached.memories.add(id(function))
        if function.__closure__:
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                try:
                    variable = Variable(cell, name, cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
                reached.memories.add(id(cell))
                reached.variables.append(variable)
                later.append(variable.value)
        if function.__defaults__:
            later.extend(function.__defaults__)
        if function.__kwdefaults__:
            later.extend(function.__kwdefaults__.values())
        if function.__dict__:
            reached.for_good = False
            reached.holders.append(function)
            later.extend(function.__dict__.values())
        if (names := _looked_up_names(function)).words:
            walk.words |= names.words
            self._globals(function.__globals__, names, walk)

    def _globals(self, namespace: dict[str, object], names: _LookedUpNames, walk: _Walk) -> None:
        for name in names.globals:
            value = namespace.get(name, _MISSING)
            if isinstance(value, types.ModuleType):
                if id(value) not in walk.seen and not is_foreign(value):
                    walk.seen[id(value)] = value
                    self._globals(
                        vars(value), _LookedUpNames(tuple(names.words & vars(value).keys()), names.words), walk
                    )
            elif value is not _MISSING:
                walk.later.append(value)
                if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                    walk.reached.helpers.append(Variable(namespace, name, value))
                else:
                    walk.reached.memories.add((id(namespace), name))
                    walk.reached.variables.append(Variable(namespace, name, value))

    def _object(self, value: object, walk: _Walk) -> None:
        """A user's object: its attributes are followed."""
        walk.classes.setdefault(type(value), False)
        if not self._known(value, walk):
            walk.reached.for_good = False
            walk.reached.holders.append(value)
            walk.owners.append(value)
            if isinstance(value, (UserDict, UserList)):
                walk.later.append(value.data)

    def _foreign(self, owner: object, walk: _Walk) -> None:
        """An object of an installed package: of its attributes only arrays are followed."""
        if self._known(owner, walk):
            return
        if isinstance(wrapped := getattr(owner, "__wrapped__", None), types.FunctionType):  # compiled, or an lru_cache
            walk.later.append(wrapped)
        for _, value in attributes(owner):
            if arrays := self._arrays_in(value):
                walk.reached.for_good = False
                walk.later.extend(arrays)

    def _arrays_in(self, value: object) -> list[object]:
        return [part for part in containers.contents(value) or (value,) if self._is_array(part)]

    def _is_array(self, value: object) -> bool:
        handle = self._kinds[type(value)] if type(value) in self._kinds else self._kind(type(value))
        return handle is Objects._array or (handle is Objects._foreign and self.hooks.parts_of(value) is not None)

    def _known(self, value: object, walk: _Walk) -> bool:
        """Whether the framework knows the parts of a value, which are then followed."""
        walk.reached.memories.add(self.hooks.memory_of(value))
        walk.reached.objects.append(value)
        if (parts := self.hooks.parts_of(value)) is None:
            return False
        if parts:
            walk.reached.for_good = False
            walk.later.extend(parts)
        return True


class _LookedUpNames(NamedTuple):
    """What a function's code looks up by name: among its globals, and anywhere."""

    globals: tuple[str, ...]
    words: frozenset[str]


_NO_NAMES = _LookedUpNames((), frozenset())
_codes: dict[int, tuple[types.CodeType, _LookedUpNames]] = {}  # by the address of the code, which is kept


def _looked_up_names(function: types.FunctionType) -> _LookedUpNames:
    code = function.__code__
    if (known := _codes.get(id(code))) is not None:
        return known[1]
    if len(_codes) > 10_000:  # code that is made while the program runs
        _codes.clear()
    names = _NO_NAMES if is_foreign(function) else _LookedUpNames(tuple(globals_of(code)), frozenset(words_of(code)))
    _codes[id(code)] = code, names
    return names


def _methods(walk: _Walk) -> list[object]:
    """The functions of the classes reached that the code reached may call, and that are not looked at yet."""
    words = walk.words
    functions = [
        function_named
        for cls, is_called in walk.classes.items()
        for word, function_named in _functions_in(cls)
        if word in words or word in _CALLED or (word.startswith("__") and (is_called or word not in _MAKING))
    ]
    return [function for function in functions if id(function) not in walk.seen]


@functools.lru_cache(maxsize=1000)
def _functions_in(cls: type) -> list[tuple[str, types.FunctionType]]:
    namespaces = [vars(owner) for owner in cls.__mro__ if not is_foreign(owner)]
    both = [(word, function_behind(value)) for names in namespaces for word, value in names.items()]
    return [(word, function) for word, function in both if isinstance(function, types.FunctionType)]


def attributes(owner: object) -> list[tuple[str, object]]:
    """The attributes that an object has itself, by name."""
    by_name = getattr(owner, "__dict__", None)
    pairs: list[tuple[str, object]] = list(by_name.items()) if type(by_name) is dict else []
    cls: type = type(owner)
    for name in slots_of(cls):
        if (value := getattr(owner, name, _MISSING)) is not _MISSING:
            pairs.append((name, value))
    return pairs


# Each handles values of its classes: `_kind` looks it up by the class.
_KINDS: tuple[tuple[tuple[type, ...], Callable[[Objects, Never, _Walk], None] | None], ...] = (
    (PLAIN, None),
    ((Future,), Objects._future),
    ((list, dict, set, deque), Objects._changeable),
    ((tuple, frozenset), Objects._fixed),
    ((functools.partial,), Objects._partial),
    ((ChainMap,), Objects._chain),
    ((types.FunctionType,), Objects._function),
    (_METHODS, Objects._method),
    (_LOCKS, Objects._lock),
    (BUFFERS, Objects._buffer),
    ((type,), Objects._class),
    ((object,), Objects._foreign),
)
