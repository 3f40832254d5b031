"""What Python code reaches by name: the words in it, the methods behind them, and what cannot be watched.

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


def words_of(code: types.CodeType) -> list[str]:
    """All words that a function's code, and the functions inside it, may look up: globals and attributes."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(words_of(constant))
    return list(found)


def members(
    classes: Collection[type], words: Collection[str], is_foreign: Callable[[Any], bool]
) -> Iterator[tuple[type, str, Any]]:
    """What these classes of the user's, and those that they inherit from, have under these words: (owner, word, it).

    Each once; classes and words that are added meanwhile are followed, too.
    """
    done: set[tuple[type, str]] = set()
    while new := [one for one in _members(classes, words, is_foreign) if one[:2] not in done]:
        for owner, word, content in new:
            done.add((owner, word))
            yield owner, word, content


def _members(
    classes: Collection[type], words: Collection[str], is_foreign: Callable[[Any], bool]
) -> Iterator[tuple[type, str, Any]]:
    for owner in dict.fromkeys(owner for one in classes for owner in one.__mro__ if not is_foreign(owner)):
        for word, content in list(vars(owner).items()):
            if word in words and not isinstance(content, (type, types.ModuleType)):
                yield owner, word, content


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
