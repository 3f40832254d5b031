"""Names in Python code: the globals and attributes that it uses, the methods behind them, and what cannot be watched.

``def fn(x): return net.scale(x)`` has the words ``net`` and ``scale``. To watch what ``fn`` reads from outside, look up
``net`` among its globals and the method ``scale`` in the class of ``net``, then continue with the words of ``scale``.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dis
import functools
import io
import os
import random
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from manyhands.errors import type_in_words

# Special methods that no operator, loop or attribute access calls on an existing object.
_NOT_CALLED = {"__init__", "__new__", "__del__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__hash__"}
_NOT_CALLED |= {"__getstate__", "__setstate__", "__init_subclass__", "__class_getitem__", "__sizeof__", "__dir__"}
_DESCRIBING = {"__doc__", "__module__", "__dict__", "__weakref__"}  # of every class; no computation depends on them
# Steps of bytecode that look up a global. (In LOAD_GLOBAL the lowest bit of the argument is not part of the number.)
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_GLOBAL_STEPS = frozenset(dis.opmap[name] for name in _OF_GLOBALS if name in dis.opmap)
_MAKING = ("__new__", "__init__", "__post_init__")  # called when a class is called


def words_of(code: types.CodeType) -> list[str]:
    """All words that a function's code, and the functions inside it, may look up: globals and attributes."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(words_of(constant))
    return list(names)


def globals_of(code: types.CodeType) -> list[str]:
    """The words that a function's code, and the functions inside it, look up among the globals.

    ``def fn(x): return net(x).loss`` has the global ``net``, and not a global ``loss``. The bytes of the code are read
    directly: ``dis`` takes a second for the functions of a large library.
    """
    names: dict[str, None] = {}
    steps, arguments = code.co_code[::2], code.co_code[1::2]
    for place, step in enumerate(steps):
        if step not in _GLOBAL_STEPS:
            continue
        number, before = arguments[place], place - 1
        while before >= 0 and steps[before] == dis.EXTENDED_ARG:
            number |= arguments[before] << 8 * (place - before)
            before -= 1
        names[code.co_names[number >> 1 if step == _LOAD_GLOBAL else number]] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(globals_of(constant))
    return list(names)


def members(
    classes: Collection[type], words: Collection[str], is_foreign: Callable[[Any], bool]
) -> Iterator[tuple[type, str, Any]]:
    """The members with these names of the user's classes and their base classes: (owner, word, member).

    This includes the methods behind operators, which no word names (``table[0]`` calls ``__getitem__``). Each member
    comes once. Classes and words that are added during the iteration are followed, too.
    """
    done: set[tuple[type, str]] = set()
    while new := [member for member in _members(classes, words, is_foreign) if member[:2] not in done]:
        for owner, word, content in new:
            done.add((owner, word))
            yield owner, word, content


def _members(
    classes: Collection[type], words: Collection[str], is_foreign: Callable[[Any], bool]
) -> Iterator[tuple[type, str, Any]]:
    for owner in dict.fromkeys(owner for kind in classes for owner in kind.__mro__ if not is_foreign(owner)):
        for word, content in list(vars(owner).items()):
            used = word in words and word not in _DESCRIBING
            if (used or _is_operator(word, content)) and not isinstance(content, (type, types.ModuleType)):
                yield owner, word, content


def _is_operator(word: str, content: Any) -> bool:
    special = word.startswith("__") and word.endswith("__") and word not in _NOT_CALLED
    return special and isinstance(function_behind(content), types.FunctionType)


def making(kind: type, is_foreign: Callable[[Any], bool]) -> Iterator[tuple[type, str, Any]]:
    """The methods that are called when an object of this class is created: (owner, word, method)."""
    for owner in kind.__mro__:
        for word in _MAKING if not is_foreign(owner) else ():
            if word in vars(owner):
                yield owner, word, vars(owner)[word]


def modules_named(words: Collection[str], package: str | None) -> Iterator[tuple[str, types.ModuleType]]:
    """The modules that code with these words may import when it runs: ``from settings import SCALE``."""
    for word in words:
        for name in (word, f"{package}.{word}"):
            if (module := sys.modules.get(name)) is not None:
                yield word, module


def function_behind(content: Any) -> Any:
    """The function behind a class's attribute: a method, a class method or a property."""
    if isinstance(content, (classmethod, staticmethod)):
        return content.__func__
    if isinstance(content, property):
        return content.fget
    return content.func if isinstance(content, functools.cached_property) else content


def why_unwatched(value: Any) -> str | None:
    """Names the kind of a value that cannot be watched, because only using it shows its next result; else None."""
    if hasattr(type(value), "__next__"):
        return "an iterator"
    if isinstance(value, contextvars.ContextVar):
        return "a context variable"
    if isinstance(value, io.IOBase):
        return "a file"
    if isinstance(value, (types.MappingProxyType, collections.ChainMap, array.array)):
        return f"{type_in_words(value)}"
    numpy: Any = sys.modules.get("numpy.random")
    numbers = (random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))
    return "a source of random numbers" if isinstance(value, numbers) else None


def is_foreign(value: Any) -> bool:
    """Whether a class, function or module belongs to Python or an installed package, not to the user."""
    module = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", "") or "")
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return root != "__main__"
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return root == "manyhands" or _is_installed(file, module.count("."))


@functools.lru_cache(maxsize=10_000)
def _is_installed(file: str, depth: int) -> bool:
    """Whether a module's file is in a folder of installed packages; ``depth``: how many packages it is in."""
    if "site-packages" in file or "dist-packages" in file:
        return True
    depth += os.path.basename(file) == "__init__.py"
    folder = file
    for _ in range(depth + 1):
        folder = os.path.dirname(folder)
    return bool(folder) and _has_packages(folder)  # as pip install --target makes it


@functools.lru_cache(maxsize=1000)
def _has_packages(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


@functools.lru_cache(maxsize=1000)
def slots_of(cls: type) -> list[str]:
    """The names of a class's slots."""
    declared = [vars(owner).get("__slots__", ()) for owner in cls.__mro__]
    words = [word for slots in declared for word in ((slots,) if isinstance(slots, str) else slots)]
    return [word for word in words if not word.startswith("__")]
