"""What ``parallel(...)`` is given, checked before anything is done with it: a lesson where it cannot be."""

from __future__ import annotations

import numbers

from manyhands.errors import EngineError


def must_be_function(function: object) -> None:
    if callable(function):
        return
    advice = "call what it gives, parallel(fn)(x), not fn before it, parallel(fn(x))"
    if type(function) is int and function > 0:
        advice = f"a scope with so many threads is parallel(threads={function})"
    raise EngineError(f"parallel(fn) takes a function, not what is of type {type(function).__name__}: {advice}")


def must_allow_memory(memory: object) -> None:
    if not isinstance(memory, numbers.Real) or isinstance(memory, bool):
        raise EngineError(
            f"parallel(fn, memory={memory!r}): how many times plain execution's memory a plan may take is a number "
            "from 1 on; 1.3 allows three tenths more"
        )
    if not float(memory) >= 1:
        raise EngineError(f"memory={memory} is less than plain execution takes: 1.3 allows three tenths more")
