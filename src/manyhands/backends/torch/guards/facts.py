"""Facts about the state that a function reads from outside, and the check whether they still hold.

Most facts are about entries of dicts: the parameters, hooks and settings of modules, a function's globals, the methods
of classes. They are checked again when their dict has changed (:mod:`.dict_versions`). The addresses of all tensors are
checked in one call.

The other facts are one generated function with a line for each, which stops at the first that is false. For "this
closure's ``scale`` is 2.0" and "this list has 3 items" it reads

    def holds():
        try:
            if not (k0.cell_contents is k1 or same(k0.cell_contents, k1)): return False
            if not (len(k2) == 3): return False
            return tensors_are_in_place()
        except NO:
            return False
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.guards.dict_versions import DictVersions, has_version, stored_in
from manyhands.python_code.generated import function

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
NOTHING = object()
_ADDED_LATER = {"__annotations__", "__abstractmethods__", "__slotnames__"}
_METHODS = (types.FunctionType, classmethod, staticmethod, property)
_NO = (LookupError, ValueError, RuntimeError, AttributeError)  # errors that a check may raise if its fact does not hold


@dataclass(frozen=True)
class Fact:
    """Where to look, what was there, and its name in messages."""

    name: str
    kind: str  # item, attribute, cell, context, length, members, content, whole, hooks, form, address, gradient
    holder: Any
    key: Any = None
    value: Any = None
    optimizer: bool = False


class Facts:
    """Many facts, checked together before every call."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        others: list[Fact] = []
        in_place: list[Fact] = []
        of_dict: dict[int, tuple[Any, list[Fact]]] = {}
        for fact in facts:
            if fact.kind == "address":
                in_place.append(fact)
                continue
            holders = [stored_in(holder) for holder in (fact.holder if fact.kind == "hooks" else [fact.holder])]
            if fact.kind == "content" or not all(map(has_version, holders)):
                others.append(fact)
                continue
            for holder in holders:
                of_dict.setdefault(id(holder), (holder, []))[1].append(fact)
        where = compat.addresses_are([fact.holder for fact in in_place], [fact.value for fact in in_place])
        self._others = _compiled(others, where)
        self._of_dict = [facts_of for _, facts_of in of_dict.values()]
        self._versions = DictVersions([holder for holder, _ in of_dict.values()])
        self._seen = b""  # the versions at which all facts about dicts were true

    def hold(self) -> bool:
        now = self._versions.now()
        if now != self._seen or not now:
            for number in self._versions.changed(self._seen, now):
                if not _are_true(self._of_dict[number]):
                    return False
            self._seen = now
        return self._others()


def first_false(facts: Iterable[Fact]) -> Fact | None:
    """The first fact that no longer holds."""
    return next((fact for fact in facts if not Facts([fact]).hold()), None)


def _are_true(facts: Iterable[Fact]) -> bool:
    """Whether facts about a dict hold."""
    try:
        return all(map(_is_true, facts))
    except _NO:
        return False


def _is_true(fact: Fact) -> bool:
    if fact.kind == "length":
        return bool(len(fact.holder) == fact.value)
    if fact.kind == "hooks":
        return bool(sum(map(len, fact.holder)) == fact.value)
    if fact.kind == "whole":  # what is the same object is not compared further
        return bool(fact.holder == fact.value)
    if fact.kind == "members":
        return bool(members_in(fact.holder) == fact.value)
    value = fact.holder.get(fact.key, NOTHING)
    return value is fact.value or (_is_compared(fact.value) and _same(value, fact.value))


def _compiled(facts: Iterable[Fact], tensors_are_in_place: Callable[[], bool]) -> Callable[[], bool]:
    names: dict[str, Any] = {"same": _same, "stored": dict.get, "NOTHING": NOTHING, "in_context": in_context, "NO": _NO}
    names["members_in"] = members_in
    names["tensors_are_in_place"] = tensors_are_in_place
    name_of: dict[int, str] = {}

    def name(value: Any) -> str:
        if id(value) not in name_of:
            name_of[id(value)] = f"k{len(names)}"
            names[name_of[id(value)]] = value
        return name_of[id(value)]

    tests = [_test(fact, name) for fact in facts]
    body = "\n".join(f"        if not ({test}): return False" for test in tests)
    tail = "        return tensors_are_in_place()\n    except NO:\n        return False"
    source = f"def holds():\n    try:\n{body}\n{tail}"
    return function("guard", source, names)


def _test(fact: Fact, name: Callable[[Any], str]) -> str:
    holder = name(fact.holder)
    if fact.kind == "length":
        return f"len({holder}) == {fact.value}"
    if fact.kind == "members":
        return f"members_in({holder}) == {name(fact.value)}"
    if fact.kind == "hooks":
        return f"sum(map(len, {holder})) == {fact.value}"
    if fact.kind == "whole":  # what is the same object is not compared further
        return f"{holder} == {name(fact.value)}"
    if fact.kind == "content":
        return f"{name(fact.key)}({holder}) == {name(fact.value)}"
    if fact.kind == "form":
        form = f"{holder}.numel() == {fact.value}"
        if not isinstance(fact.value, int):
            form = f"{holder}.shape == {name(fact.value[0])} and {holder}.stride() == {name(fact.value[1])}"
        return form if fact.key is None else f"{holder}.requires_grad is {fact.key} and {form}"
    if fact.kind == "gradient":
        now = f"{holder}.grad is not None" if fact.value is ... else f"{holder}.grad is {name(fact.value)}"
        hooked = f"{holder}._backward_hooks or {holder}._post_accumulate_grad_hooks"
        return f"{now} and {holder}.requires_grad is {fact.key} and not ({hooked})"
    now = _now(fact, name)
    if _is_compared(fact.value):
        known = name(fact.value)
        return f"{now} is {known} or same({now}, {known})"
    return f"{now} is {name(fact.value)}"


def _now(fact: Fact, name: Callable[[Any], str]) -> str:
    """The expression for the value in its holder. A key is not written out: it may be a large tensor."""
    holder = name(fact.holder)
    if fact.kind == "cell":
        return f"{holder}.cell_contents"
    if fact.kind == "context":
        return f"in_context({holder})"
    if fact.kind == "attribute":
        return f"{holder}.{fact.key}"
    if isinstance(fact.holder, dict):  # as it is stored: a subclass may make a new value each time it is asked
        return f"stored({holder}, {name(fact.key)}, NOTHING)"
    return f"{holder}[{name(fact.key)}]"


def members_in(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The names in a class, and its methods: ``getattr(layer, name)(x)`` calls one that no code names.

    What Python adds later, without changing what the class does, is left out.
    """
    return {
        word: content if isinstance(content, _METHODS) else None
        for word, content in namespace.items()
        if word not in _ADDED_LATER
    }


def in_context(variable: ContextVar[Any]) -> Any:
    """The value of a context variable, or its default."""
    try:
        return variable.get()
    except LookupError:
        return NOTHING


def _is_compared(value: Any) -> bool:
    """Whether an equal value counts as the same."""
    return isinstance(value, PLAIN) and value is not None and not isinstance(value, bool)


def _same(value: Any, expected: Any) -> bool:
    return value is expected or (type(value) is type(expected) and value == expected and str(value) == str(expected))
