"""What a function takes from outside its arguments, watched: closures, globals, defaults, attributes of objects.

A compiled function holds for what it found there when it was traced. So before anything is traced all of that is
written down as facts: this closure's ``scale`` is 2.0, that object's ``weight`` is this array. Two uses: a fact that a
plain call changes shows that the function has effects on Python, and it is not compiled; and before every later call
all facts together say whether the compiled function still holds.

``calls = []; def fn(x): calls.append(1); return x * scale`` gives three facts: ``calls`` is that list, its length is 0,
``scale`` is 2.0. After one plain call the second does not hold: ``changed()`` names it.

Not seen: attributes of installed modules, private attributes of other people's objects, elements of lists longer than
``_LONG``, and what is reached only through C code.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from manyhands.code_names import function_behind, is_foreign, members, slots_of, why_unwatched, words_of
from manyhands.errors import CannotTrace

BY_VALUE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice)
_LONG = 1000
_MOST = 20_000  # facts; beyond that looking costs more than compiling gains
_NOTHING = object()

# What a framework adds: the parts of one of its objects by name, each with the way to look it up (None: not special).
Parts = Callable[[Any], "Iterable[tuple[str, Callable[[], Any]]] | None"]


@dataclass(frozen=True, slots=True)
class _Fact:
    name: str
    look: Callable[[], Any]
    value: Any


class Outside:
    """The facts about what a function, and some arguments of its call, reach."""

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any], parts: Parts) -> None:
        self._facts: list[_Fact] = []
        self._seen: dict[int, Any] = {}  # kept, so that no other object can come to its address
        self._opaque: set[int] = set()  # those of the seen that cannot be looked into
        self._parts = parts
        self._words = {"__call__"}  # that the code seen so far looks up
        self._classes: dict[type, None] = {}  # of objects that were seen, and those that were seen themselves
        self._visit(function, getattr(function, "__name__", type(function).__name__))
        for number, one in enumerate(arguments):
            self._visit(one, f"argument {number}")
        for owner, word, content in members(self._classes, self._words, is_foreign):
            self._fact(f"{owner.__name__}.{word}", functools.partial(vars(owner).get, word, _NOTHING))
            self._visit(function_behind(content), f"{owner.__name__}.{word}")

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return self.changed() is None

    def changed(self) -> str | None:
        """The name of the first thing that is not as it was."""
        for fact in self._facts:
            now = fact.look()
            if now is not fact.value and not _same(now, fact.value):
                return fact.name
        return None

    def too_large(self) -> bool:
        """Whether so much is reached that not all of it is watched."""
        return len(self._facts) >= _MOST

    def reaches(self, value: Any) -> bool:
        """Whether this very object is among what was found."""
        return self._seen.get(id(value), _NOTHING) is value

    def watches(self, value: Any) -> bool:
        """Whether a change of this value, which was found, would be noticed."""
        if isinstance(value, (*BY_VALUE, type, types.ModuleType)):
            return True
        return self.reaches(value) and id(value) not in self._opaque

    # Walking

    def _fact(self, name: str, look: Callable[[], Any]) -> None:
        try:
            value = look()
        except ValueError:  # a closure's variable that is not bound yet
            return
        if len(self._facts) < _MOST:
            self._facts.append(_Fact(name, functools.partial(_looked, look), value))
            self._visit(value, name)

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (*BY_VALUE, type, types.ModuleType)) or id(value) in self._seen:
            return
        if (kind := why_unwatched(value)) is not None:
            raise CannotTrace(f"it reaches {name}, {kind}: what comes of that cannot be watched, so it is run as it is")
        self._seen[id(value)] = value
        if (parts := self._parts(value)) is not None:
            for word, look in parts:
                self._fact(f"{name}.{word}", look)
        elif isinstance(value, (list, tuple, deque)):
            self._sequence(value, name)
        elif isinstance(value, (set, frozenset)):
            self._fact(f"the content of {name}", functools.partial(frozenset, value))
        elif isinstance(value, (bytearray, memoryview)):
            self._fact(f"the content of {name}", functools.partial(bytes, value))
        elif isinstance(value, dict):
            self._fact(f"the length of {name}", functools.partial(len, value))
            self._items(value, name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, name.rpartition(".")[0] or "self")
            self._visit(value.__func__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, name)
        else:
            self._object(value, name)

    def _object(self, value: Any, name: str) -> None:
        wrapped = getattr(value, "__wrapped__", None)  # a function that a framework has compiled
        if isinstance(wrapped, types.FunctionType):
            self._visit(wrapped, name)
        hidden = is_foreign(type(value))
        if hidden and not callable(value):
            self._opaque.add(id(value))
        if isinstance(own := getattr(value, "__dict__", None), dict):
            self._items(own, name, lambda word: not (hidden and word.startswith("_")))
        if not hidden:
            if own is not None:
                self._fact(f"the number of {name}'s attributes", functools.partial(len, own))
            self._class(type(value), name)
            for word in slots_of(type(value)):
                self._fact(f"{name}.{word}", functools.partial(getattr, value, word, _NOTHING))

    def _class(self, one: type, name: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """The numbers and words that a class of the user has for all its objects."""
        self._classes[one] = None
        for owner in one.__mro__:
            for word, content in list(vars(owner).items()) if not is_foreign(owner) else ():
                if isinstance(content, BY_VALUE) and not word.startswith("__") and wanted(word):
                    self._fact(f"{name}.{word}", functools.partial(getattr, owner, word, _NOTHING))

    def _sequence(self, value: Any, name: str) -> None:
        if isinstance(value, tuple):
            for number, one in enumerate(value[:_LONG]):
                self._visit(one, f"{name}[{number}]")
            return
        self._fact(f"the length of {name}", functools.partial(len, value))
        for number in range(min(len(value), _LONG)):
            self._fact(f"{name}[{number}]", functools.partial(value.__getitem__, number))

    def _items(self, own: dict[Any, Any], name: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
        for key in list(own)[:_LONG]:
            if not isinstance(key, str):
                self._fact(f"{name}[{key!r}]", functools.partial(own.get, key, _NOTHING))
            elif wanted(key):
                self._fact(f"{name}.{key}", functools.partial(own.get, key, _NOTHING))

    def _function(self, function: types.FunctionType, name: str) -> None:
        if is_foreign(function):
            return
        names = words_of(function.__code__)
        self._words.update(names)
        for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            look = functools.partial(_content, cell)
            self._fact(word, look)
            if isinstance(content := _looked(look), type):
                self._class(content, word, names.__contains__)
        for word in names:
            content = function.__globals__.get(word, _NOTHING)
            if isinstance(content, type):
                self._class(content, word, names.__contains__)
            elif isinstance(content, types.ModuleType) and not is_foreign(content):
                used = vars(content).keys() & set(names)
                self._items(vars(content), word, used.__contains__)
            elif content is not _NOTHING and not isinstance(content, types.ModuleType):
                self._fact(word, functools.partial(function.__globals__.get, word, _NOTHING))
        self._visit(function.__defaults__, f"a default of {name}")
        self._visit(function.__kwdefaults__, f"a default of {name}")
        self._fact(f"the number of {name}'s attributes", functools.partial(len, vars(function)))
        self._items(vars(function), name)


def _looked(look: Callable[[], Any]) -> Any:
    """What is there now, or a sign that nothing is."""
    try:
        return look()
    except (LookupError, ValueError):
        return _NOTHING


def _content(cell: Any) -> Any:
    return cell.cell_contents


def _same(one: Any, other: Any) -> bool:
    """Equal plain values are the same; 1 is not True, -0.0 is not 0.0, but "not a number" is itself."""
    if type(one) is not type(other) or not isinstance(other, (*BY_VALUE, frozenset)):
        return False
    return repr(one) == repr(other) if isinstance(other, (float, complex)) else bool(one == other)
