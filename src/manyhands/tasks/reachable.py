"""What a task can touch: everything that its function and its arguments lead to.

Two steps. First the arguments: what lists, tuples, dicts, sets, deques, ``ChainMap``, dataclasses and partial functions
hold, and the futures among that, whose results the task takes. Then what functions and objects lead to: a function to
the variables it closes over, its default values, and the globals its code names; a method to its object; an object and
a class to the attributes and methods that the code names. Of its other attributes only arrays are followed: in
``self.futures.append(task(self.step)(x))`` the task is not concerned with ``futures``, unless the code of ``step`` is.

::

    table, log = torch.zeros(3), []
    def count(row, store): table[row] += 1; store.note(row)     # reaches ``table``, ``store`` and what ``note`` names

Of functions and classes of installed packages only closures and defaults are followed, not what their code names, and
of objects of such classes only the arrays among their attributes. What C code holds is not found.
"""

from __future__ import annotations

import array
import dataclasses
import dis
import enum
import functools
import sys
import threading
import types
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Set
from typing import TYPE_CHECKING, NamedTuple, Never, TypeAlias, cast

from manyhands.addresses import span_of_array, span_of_buffer
from manyhands.code_names import function_behind, is_foreign, slots_of, words_of
from manyhands.tasks import containers
from manyhands.tasks.node import Future, Job

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Nobody can write to them.
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
_BY_NAME = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}

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


class Found:
    """What some values lead to."""

    __slots__ = (
        "arrays",
        "for_good",
        "helpers",
        "holders",
        "in_turn",
        "inputs",
        "locks",
        "memories",
        "objects",
        "reached",
        "variables",
        "words",
    )

    def __init__(self) -> None:
        self.memories: set[Hashable] = set()  # that they are, or may be, in
        self.inputs: list[Job] = []  # whose results are among the arguments
        self.reached: list[Job] = []  # whose futures a function or an object holds
        self.arrays: list[object] = []  # NumPy's, and buffers
        self.objects: list[object] = []  # that a framework may have something to say of
        self.holders: list[object] = []  # Python's containers and the user's objects
        self.variables: list[Variable] = []
        self.helpers: list[Variable] = []  # globals that name a function or a class, and what classes have
        self.in_turn: Collection[object] = ()  # of the objects, those that one task at a time can use
        self.locks = False  # whether a lock, or the like, is among them
        self.words: set[str] | None = None  # the names of attributes that are looked up; None: perhaps all
        self.for_good = True  # whether this is all that there will ever be, as long as the variables stay


class _Walk:
    """A look at some values, under way."""

    __slots__ = ("classes", "followed", "found", "later", "owners", "seen", "stack", "words")

    def __init__(self, values: Iterable[object]) -> None:
        self.found = Found()
        self.stack = [*values]  # to be looked at
        self.later: list[object] = []  # what functions and objects lead to, when the arguments are through
        self.seen: dict[int, object] = {}
        self.classes: dict[type, bool] = {}  # the user's, whose methods may be called, and whether they are themselves
        self.owners: list[object] = []  # objects of the user's
        self.followed: set[tuple[int, str, bool]] = set()  # attributes of these, wholly or for arrays
        self.words: set[str] = set()  # that the user's code says


_Kind: TypeAlias = "Callable[[Objects, object, _Walk], None]"


class Objects:
    """What is known of objects: see :class:`manyhands.tasks.scope.parallel`, which gets it from the framework."""

    def __init__(
        self,
        memory_of: Callable[[object], Hashable],
        parts_of: Callable[[object], Collection[object] | None],
        version_of: Callable[[object], object] | None,
        bound: Callable[[Callable[..., object]], Callable[..., object]] | None,
        in_turn: Callable[[list[object], Set[str]], Collection[object]] | None,
    ) -> None:
        self.in_turn = in_turn
        self.memory_of, self.parts_of, self.version_of, self.bound = memory_of, parts_of, version_of, bound
        self.rebound: set[Hashable] = set()  # variables that some task has declared to write
        self._kinds: dict[type, _Kind | None] = {}

    def look(self, *values: object) -> Found:
        """All that these values lead to, down to what is known of results that are there; plain values left out."""
        walk = _Walk(values)
        self._through(walk)
        found = walk.found
        if walk.later or walk.owners or walk.classes:
            inputs, found.inputs = found.inputs, found.reached
            while walk.later or self._goes_on(walk):
                walk.stack, walk.later = walk.later, []
                self._through(walk)
            found.inputs, found.reached = inputs, found.inputs
        if self.in_turn is not None:
            found.in_turn = self.in_turn(found.objects, walk.words)
        return found

    def _goes_on(self, walk: _Walk) -> bool:
        """Whether the code names methods or attributes of the objects; they are to be looked at next."""
        if not walk.classes:
            return False
        found, words = walk.found, walk.words
        found.words = words if words and words.isdisjoint(_ANY) else None
        for owner in walk.owners:
            for name, value in attributes(owner):
                wholly = found.words is None or name in words
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
                    walk.found.helpers.append(Variable(owner, name, value))
                    if not isinstance(value, _CODE):
                        walk.found.for_good = False
                        walk.later.append(value)

    def _through(self, walk: _Walk) -> None:
        stack, seen, kinds = walk.stack, walk.seen, self._kinds
        while stack:
            one = stack.pop()
            cls = type(one)
            handle = kinds[cls] if cls in kinds else self._kind(cls)
            if handle is not None and id(one) not in seen:
                seen[id(one)] = one
                handle(self, one, walk)

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

    def _future(self, one: Future[object], walk: _Walk) -> None:
        walk.found.for_good = False
        walk.found.memories.add(one._job)
        walk.found.inputs.append(one._job)
        if one._job.over:
            walk.stack.append(one._job.value)

    def _changeable(self, one: dict[object, object] | Iterable[object], walk: _Walk) -> None:
        walk.found.for_good = False
        walk.found.memories.add(id(one))
        walk.found.holders.append(one)
        walk.stack.extend(one.values() if isinstance(one, dict) else one)
        if type(one) not in (list, dict, set, deque):
            if not is_foreign(type(one)):
                walk.classes.setdefault(type(one), False)
            walk.later.extend(value for _, value in attributes(one))

    def _fixed(self, one: Iterable[object], walk: _Walk) -> None:
        walk.stack.extend(one)

    def _partial(self, one: object, walk: _Walk) -> None:
        walk.found.memories.add(id(one))
        walk.stack.extend(containers.contents(one) or ())

    def _dataclass(self, one: object, walk: _Walk) -> None:
        walk.stack.extend(containers.contents(one) or ())
        self._object(one, walk)

    def _chain(self, one: ChainMap[object, object], walk: _Walk) -> None:
        walk.stack.extend(one.maps)
        self._object(one, walk)

    def _array(self, one: NDArray[np.generic], walk: _Walk) -> None:
        found = walk.found
        found.arrays.append(one)
        found.memories.add(span_of_array(one) or id(one))
        if one.dtype.hasobject:
            found.for_good = False
            walk.later.extend(one.ravel().tolist())

    def _buffer(self, one: object, walk: _Walk) -> None:
        walk.found.arrays.append(one)
        walk.found.memories.add(self.memory_of(one))
        if (span := span_of_buffer(one)) is not None:
            walk.found.for_good = False  # a bytearray that grows moves
            walk.found.memories.add(span)

    def _lock(self, one: object, walk: _Walk) -> None:
        walk.found.locks = True
        walk.found.memories.add(id(one))

    def _class(self, one: type, walk: _Walk) -> None:
        if not is_foreign(one):
            walk.classes[one] = True

    def _method(self, one: types.MethodType, walk: _Walk) -> None:
        walk.later.append(one.__self__)
        if (function := getattr(one, "__func__", None)) is not None:
            walk.later.append(function)

    def _function(self, function_type: types.FunctionType, walk: _Walk) -> None:
        found, later = walk.found, walk.later
        found.memories.add(id(function_type))
        if function_type.__closure__:
            for name, cell in zip(function_type.__code__.co_freevars, function_type.__closure__, strict=True):
                try:
                    variable = Variable(cell, name, cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
                found.memories.add(id(cell))
                found.variables.append(variable)
                later.append(variable.value)
        if function_type.__defaults__:
            later.extend(function_type.__defaults__)
        if function_type.__kwdefaults__:
            later.extend(function_type.__kwdefaults__.values())
        if function_type.__dict__:
            found.for_good = False
            found.holders.append(function_type)
            later.extend(function_type.__dict__.values())
        if (said := _said(function_type)).words:
            walk.words |= said.words
            self._globals(function_type.__globals__, said, walk)

    def _globals(self, names: dict[str, object], said: _Said, walk: _Walk) -> None:
        for name in said.globals:
            value = names.get(name, _MISSING)
            if isinstance(value, types.ModuleType):
                if id(value) not in walk.seen and not is_foreign(value):
                    walk.seen[id(value)] = value
                    self._globals(vars(value), _Said(tuple(said.words & vars(value).keys()), said.words), walk)
            elif value is not _MISSING:
                walk.later.append(value)
                if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
                    walk.found.helpers.append(Variable(names, name, value))
                else:
                    walk.found.memories.add((id(names), name))
                    walk.found.variables.append(Variable(names, name, value))

    def _object(self, one: object, walk: _Walk) -> None:
        """One of the user's: followed into its attributes."""
        walk.classes.setdefault(type(one), False)
        if not self._known(one, walk):
            walk.found.for_good = False
            walk.found.holders.append(one)
            walk.owners.append(one)
            if isinstance(one, (UserDict, UserList)):
                walk.later.append(one.data)

    def _foreign(self, one: object, walk: _Walk) -> None:
        """One of an installed package's: of what it holds only arrays are looked at."""
        if self._known(one, walk):
            return
        if isinstance(wrapped := getattr(one, "__wrapped__", None), types.FunctionType):  # compiled, or kept results
            walk.later.append(wrapped)
        for _, value in attributes(one):
            if arrays := self._arrays_in(value):
                walk.found.for_good = False
                walk.later.extend(arrays)

    def _arrays_in(self, value: object) -> list[object]:
        return [part for part in containers.contents(value) or (value,) if self._is_array(part)]

    def _is_array(self, one: object) -> bool:
        handle = self._kinds[type(one)] if type(one) in self._kinds else self._kind(type(one))
        return handle is Objects._array or (handle is Objects._foreign and self.parts_of(one) is not None)

    def _known(self, one: object, walk: _Walk) -> bool:
        """Whether the framework says what it consists of, and that is noted."""
        walk.found.memories.add(self.memory_of(one))
        walk.found.objects.append(one)
        if (parts := self.parts_of(one)) is None:
            return False
        if parts:
            walk.found.for_good = False
            walk.later.extend(parts)
        return True


class _Said(NamedTuple):
    """What a function's code looks up by name: among its globals, and anywhere."""

    globals: tuple[str, ...]
    words: frozenset[str]


_NOTHING_SAID = _Said((), frozenset())
_codes: dict[int, tuple[types.CodeType, _Said]] = {}  # by the address of the code, which is kept


def _said(function: types.FunctionType) -> _Said:
    code = function.__code__
    if (known := _codes.get(id(code))) is not None:
        return known[1]
    if len(_codes) > 10_000:  # code that is made while the program runs
        _codes.clear()
    said = _NOTHING_SAID if is_foreign(function) else _Said(tuple(_global_names(code)), frozenset(words_of(code)))
    _codes[id(code)] = code, said
    return said


def _global_names(code: types.CodeType) -> dict[str, None]:
    names = {step.argval: None for step in dis.get_instructions(code) if step.opname in _BY_NAME}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _methods(walk: _Walk) -> list[object]:
    """The functions of the classes reached that the code reached may call, and that are not looked at yet."""
    words = walk.words
    functions = [
        one
        for cls, is_called in walk.classes.items()
        for word, one in _functions_in(cls)
        if word in words or word in _CALLED or (word.startswith("__") and (is_called or word not in _MAKING))
    ]
    return [function for function in functions if id(function) not in walk.seen]


@functools.lru_cache(maxsize=1000)
def _functions_in(cls: type) -> list[tuple[str, types.FunctionType]]:
    namespaces = [vars(owner) for owner in cls.__mro__ if not is_foreign(owner)]
    both = [(word, function_behind(value)) for names in namespaces for word, value in names.items()]
    return [(word, one) for word, one in both if isinstance(one, types.FunctionType)]


def attributes(one: object) -> list[tuple[str, object]]:
    """The attributes that an object has itself, by name."""
    by_name = getattr(one, "__dict__", None)
    pairs: list[tuple[str, object]] = list(by_name.items()) if type(by_name) is dict else []
    cls: type = type(one)
    for name in _slots(cls):
        if (value := getattr(one, name, _MISSING)) is not _MISSING:
            pairs.append((name, value))
    return pairs


@functools.lru_cache(maxsize=1000)
def _slots(cls: type) -> list[str]:
    return slots_of(cls)


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
