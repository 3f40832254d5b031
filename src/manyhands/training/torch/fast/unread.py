"""Stands for a plain value in a step that is captured, and notices whether the step reads it.

A CUDA graph repeats what Python did once. So the number of a batch, or the name of a file in it, may change from replay
to replay only if no code looks at it. While steps warm up they get an :class:`Unread` instead::

    value = unread(7, reads.append)
    names = [value]             nothing
    value % 2, f"{value}"       reads: ["train.py:31", "train.py:31"]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import manyhands
from manyhands import tree

Report = Callable[[str], object]
_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, manyhands))
# What every object has, and what says nothing about the value.
_UNTOUCHED = {
    *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__del__", "__dict__", "__slots__"),
    *("__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__class_getitem__", "__getnewargs__"),
}


class Unread:
    """A value that reports where it is read."""

    __slots__ = ("_report", "_value")

    def __init__(self, value: Any, report: Report) -> None:
        self._value, self._report = value, report

    def __getattr__(self, name: str) -> Any:
        return getattr(_read(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.map_leaves(_value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def unread(value: Any, report: Report) -> Any:
    """Something that can be used as the value can; ``report`` gets the line of each use."""
    return _class_for(value.__class__)(value, report)


@functools.cache
def _class_for(kind: Any) -> type[Unread]:
    """A class with the special methods of this one; ``isinstance`` takes its instances for this one's."""
    special = {name for name in dir(kind) if name.startswith("__") and callable(getattr(kind, name))} - _UNTOUCHED
    methods: dict[str, Any] = {name: _forwarded(name) for name in special}
    return type("Unread", (Unread,), {"__slots__": (), **methods, "__class__": property(lambda _: kind)})


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Unread, *args: Any) -> Any:
        return getattr(_read(self), name)(*map(_value_of, args))

    return method


def _value_of(value: Any) -> Any:
    return _read(value) if issubclass(type(value), Unread) else value


def _read(value: Any) -> Any:
    object.__getattribute__(value, "_report")(_line_outside())
    return object.__getattribute__(value, "_value")


def _line_outside() -> str:
    """The line of the user's code that is running, as ``file.py:31``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
