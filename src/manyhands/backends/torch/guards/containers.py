"""Puts back the content of lists, dicts, sets and arrays that tracing has changed.

The methods are those of Python's own classes. A subclass may refuse changes (a frozen dict of settings), or mean
something else by the same name: ``Counter.update`` adds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any


def put_back(holder: Any, before: Any) -> None:
    """Give ``holder`` the content of its copy ``before`` again; one that has not changed is not written to."""
    if isinstance(holder, dict):
        _put_back_dict(holder, before)
    elif isinstance(holder, list):
        if not _are_same(holder, before):
            list.__setitem__(holder, slice(None), before)
    elif isinstance(holder, deque):
        if not _are_same(holder, before):
            deque.clear(holder)
            deque.extend(holder, before)
    elif isinstance(holder, set):
        if not set.__eq__(holder, before):
            set.clear(holder)
            set.update(holder, before)
    elif isinstance(holder, bytearray):
        if bytes(holder) != bytes(before):
            bytearray.__setitem__(holder, slice(None), before)
    elif holder.tobytes() != before.tobytes():  # an array of NumPy, which may be read-only
        holder[...] = before


def put_back_item(holder: dict[Any, Any], key: Any, value: Any) -> None:
    _own_class(holder).__setitem__(holder, key, value)


def _put_back_dict(holder: dict[Any, Any], before: dict[Any, Any]) -> None:
    if _are_same(holder, before) and _are_same(dict.values(holder), before.values()):
        return
    cls = _own_class(holder)
    cls.clear(holder)  # also for the order of the keys
    for key, value in before.items():
        cls.__setitem__(holder, key, value)


def _own_class(holder: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Python's class: the methods of ``dict`` would break the order that an ``OrderedDict`` keeps."""
    return OrderedDict if isinstance(holder, OrderedDict) else dict


def _are_same(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
