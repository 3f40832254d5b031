"""Facts about what a function takes from outside, and the code that asks whether they still hold.

The facts of a plan are one generated function, a line for each, that stops at the first "no": this closure's ``scale``
is 2.0 and this weight is where it was reads

    def holds():
        try:
            if not (k0.cell_contents is k1 or same(k0.cell_contents, k1)): return False
            if not (k2.data_ptr() == 94031): return False
            return True
        except (LookupError, ...):
            return False
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.generated import function

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)


@dataclass(frozen=True)
class Fact:
    """Where to look, what was there, and how to say it."""

    name: str
    kind: str  # item, attribute, cell, length, content, whole, hooks, form, address, gradient
    holder: Any
    key: Any = None
    value: Any = None
    optimizer: bool = False


def compiled(facts: Iterable[Fact]) -> Callable[[], bool]:
    names: dict[str, Any] = {}
    name_of: dict[int, str] = {}

    def name(value: Any) -> str:
        if id(value) not in name_of:
            name_of[id(value)] = f"k{len(names)}"
            names[name_of[id(value)]] = value
        return name_of[id(value)]

    tests = [_test(fact, name) for fact in facts]
    body = "\n".join(f"        if not ({test}): return False" for test in tests)
    tail = (
        "        return True\n    except (LookupError, ValueError, RuntimeError, AttributeError):\n        return False"
    )
    source = f"def holds():\n    try:\n{body}\n{tail}"
    names["same"] = _same
    return function("guard", source, names)


def _test(fact: Fact, name: Callable[[Any], str]) -> str:
    holder = name(fact.holder)
    if fact.kind == "length":
        return f"len({holder}) == {fact.value}"
    if fact.kind == "hooks":
        hooks = [name(hooks_of) for hooks_of in fact.holder]
        counted = " + ".join(f"len({hook})" for hook in hooks)
        return f"{counted} == {fact.value}" if fact.value else f"not ({' or '.join(hooks)})"
    if fact.kind == "whole":  # what is the same object is not compared further
        return f"{holder} == {name(fact.value)}"
    if fact.kind == "content":
        return f"{name(fact.key)}({holder}) == {name(fact.value)}"
    if fact.kind == "form":
        form = f"{holder}.numel() == {fact.value}"
        if not isinstance(fact.value, int):
            form = f"{holder}.shape == {name(fact.value[0])} and {holder}.stride() == {name(fact.value[1])}"
        return form if fact.key is None else f"{holder}.requires_grad is {fact.key} and {form}"
    if fact.kind == "address":
        return f"{holder}.data_ptr() == {fact.value}"
    if fact.kind == "gradient":
        now = f"{holder}.grad is not None" if fact.value is ... else f"{holder}.grad is {name(fact.value)}"
        hooked = f"{holder}._backward_hooks or {holder}._post_accumulate_grad_hooks"
        return f"{now} and {holder}.requires_grad is {fact.key} and not ({hooked})"
    now = f"{holder}{_inside(fact, name)}"
    if isinstance(fact.value, PLAIN) and fact.value is not None and not isinstance(fact.value, bool):
        known = name(fact.value)
        return f"{now} is {known} or same({now}, {known})"
    return f"{now} is {name(fact.value)}"


def _inside(fact: Fact, name: Callable[[Any], str]) -> str:
    """Where in its holder the value is. An item's key may be a large tensor: it is not written out."""
    if fact.kind == "cell":
        return ".cell_contents"
    return f".{fact.key}" if fact.kind == "attribute" else f"[{name(fact.key)}]"


def _same(value: Any, expected: Any) -> bool:
    return value is expected or (type(value) is type(expected) and value == expected and str(value) == str(expected))
