"""Detects which of many dicts have changed since the last check: thousands in a few microseconds.

CPython gives a dict a new version at every change, and keeps it in the dict (PEP 509). The parameters, hooks and
settings of a net of 350 modules are in some 2,800 dicts. NumPy reads their versions from memory as one array, instead
of every entry of every dict; ``benchmarks/planning_time.py --parts`` prints what all guards of a call take. Python has
no function that gives a version, and PyTorch's (Dynamo guards with versions, too) takes as long as reading some
entries.

CPython has versions up to 3.12. Whether they are there, and change with the dict, is tried out before they are used;
otherwise every dict counts as changed.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manyhands.backends.torch.compat.memory_words import reader

_VERSION = 24  # offset in bytes in a dict object: after reference count, type and number of entries


def stored_in(holder: object) -> object:
    """The dict behind a class's ``__dict__``, which shows it without letting anybody change it; else the value."""
    if type(holder) is types.MappingProxyType:
        behind = gc.get_referents(holder)
        return behind[0] if len(behind) == 1 else holder
    return holder


def has_version(value: object) -> bool:
    """Whether a value is a dict that only Python's own methods change, so that each change gives a new version."""
    return type(value) in (dict, OrderedDict, defaultdict)


class DictVersions:
    """The versions of some dicts, which are kept alive."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        if not dicts or not _can_be_read():
            self.now: Callable[[], bytes] = bytes
            return
        self.now = reader([id(content) + _VERSION for content in dicts])  # empty where they cannot be read

    def changed(self, before: bytes, now: bytes) -> Sequence[int]:
        """The numbers of the dicts that changed between two results of :meth:`now`; all of them if that is unknown."""
        if not before or not now:
            return range(len(self._dicts))
        differs = np.frombuffer(before, np.uint64) != np.frombuffer(now, np.uint64)
        return np.flatnonzero(differs).tolist()


@functools.cache
def _can_be_read() -> bool:
    """Whether versions are where this module looks for them: every change, and nothing else, gives a new one."""
    if sys.implementation.name != "cpython":  # elsewhere an id is not an address
        return False
    kinds: list[dict[Any, Any]] = [{}, OrderedDict(), defaultdict(int)]
    for changing in kinds:
        staying = {0: 0}
        read = reader([id(content) + _VERSION for content in (changing, staying)])
        changes: list[Callable[[dict[Any, Any]], Any]] = [
            lambda content: content.__setitem__("a", 1),
            lambda content: content.__setitem__("a", 2),
            lambda content: content.update(b=3),
            lambda content: content.pop("b"),
            lambda content: content.setdefault("c", 1),
            lambda content: content.__delitem__("a"),
            lambda content: content.clear(),
        ]
        seen = [_words(read())]
        for change in changes:
            if _words(read()) != seen[-1]:
                return False
            change(changing)
            seen.append(_words(read()))
        if len({version for version, _ in seen}) < len(seen) or len({version for _, version in seen}) > 1:
            return False
    return _classes_have_versions()


def _classes_have_versions() -> bool:
    class Probe:
        pass

    read, seen = reader([id(stored_in(vars(Probe))) + _VERSION]), set()
    for number in range(3):
        seen.add(read())
        Probe.attribute = number  # type: ignore[attr-defined]
    return len(seen) == 3


def _words(read: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(read, np.uint64).tolist())
