"""Names in Python code: the globals and attributes that it uses, the methods behind them, and what cannot be watched.

``def fn(x): return net.scale(x)`` has the words ``net`` and ``scale``. Whoever watches what ``fn`` takes from outside
finds ``net`` among its globals, and in the class of ``net`` a method ``scale``, whose words come next.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import io
import random
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

# Special methods that no operator, loop or attribute calls on an object that is there already.
_NOT_CALLED = {"__init__", "__new__", "__del__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__hash__"}
_NOT_CALLED |= {"__getstate__", "__setstate__", "__init_subclass__", "__class_getitem__", "__sizeof__", "__dir__"}
_MAKING = ("__new__", "__init__", "__post_init__")  # what calling a class calls


def words_of(code: types.CodeType) -> list[str]:
    """All words that a function's code, and the functions inside it, may look up: globals and attributes."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(words_of(constant))
    return list(names)


def members(
    classes: Collection[type], words: Collection[str], is_foreign: Callable[[Any], bool]
) -> Iterator[tuple[type, str, Any]]:
    """What these classes of the user's, and those that they inherit from, have under these words: (owner, word, it).

    Methods behind operators (``table[0]`` calls ``__getitem__``), which no word names, are among them. Each once;
    classes and words that are added meanwhile are followed, too.
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
            if (word in words or _is_operator(word, content)) and not isinstance(content, (type, types.ModuleType)):
                yield owner, word, content


def _is_operator(word: str, content: Any) -> bool:
    special = word.startswith("__") and word.endswith("__") and word not in _NOT_CALLED
    return special and isinstance(function_behind(content), types.FunctionType)


def making(kind: type, is_foreign: Callable[[Any], bool]) -> Iterator[tuple[type, str, Any]]:
    """What is called when an object of this class is made: (owner, word, it)."""
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
    """The function that is called through a class's attribute: a method, a method of the class, a property."""
    if isinstance(content, (classmethod, staticmethod)):
        return content.__func__
    if isinstance(content, property):
        return content.fget
    return content.func if isinstance(content, functools.cached_property) else content


def why_unwatched(value: Any) -> str | None:
    """What a value is whose next answer nobody can know without asking for it, or None."""
    if hasattr(type(value), "__next__"):
        return "an iterator"
    if isinstance(value, contextvars.ContextVar):
        return "a context variable"
    if isinstance(value, io.IOBase):
        return "a file"
    if isinstance(value, (types.MappingProxyType, collections.ChainMap, array.array)):
        return f"a {type(value).__name__}"
    numpy: Any = sys.modules.get("numpy.random")
    numbers = (random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))
    return "a source of random numbers" if isinstance(value, numbers) else None


def is_foreign(value: Any) -> bool:
    """Whether a class, function or module is not the user's: Python's own, or of an installed package."""
    module = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", "") or "")
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return root != "__main__"
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return root == "manyhands" or "site-packages" in file or "dist-packages" in file


@functools.lru_cache(maxsize=1000)
def slots_of(cls: type) -> list[str]:
    """The names of a class's slots."""
    declared = [vars(owner).get("__slots__", ()) for owner in cls.__mro__]
    words = [word for slots in declared for word in ((slots,) if isinstance(slots, str) else slots)]
    return [word for word in words if not word.startswith("__")]
