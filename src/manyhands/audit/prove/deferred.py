"""Values that are read late: what a cured line gives instead of a number.

``total += loss.item()`` waits for the device. If ``loss.item()`` gives a :class:`Deferred`, ``total`` becomes the
unfinished sum ``0.0 + loss.item()``; it is computed in Python, in the same order and with the same rounding, when
it is needed: by an ``if``, ``float()``, ``print``, an index, a library that wants a number.

>>> first = Deferred(lambda value: value / 4, (3.0,), line=0)
>>> total = 1.0 + first
>>> total.is_known, first.is_known
(False, False)
>>> float(total), first.is_known
(1.75, True)
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

_IMMUTABLE = (int, float, complex, str)


class Deferred:
    """A value that was not waited for yet. ``line`` is the number of the line that it was read in."""

    # Called when values that were read in a line are needed, once however many they are: with the line's number.
    needed: ClassVar[Callable[[int], None] | None] = None

    __slots__ = ("_arguments", "_function", "_value", "is_known", "is_number", "line")

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], line: int | None = None, *, number: bool = True
    ) -> None:
        self._function, self._arguments, self.line = function, arguments, line
        self.is_number = number  # or text: immutable, so that arithmetic with it can wait as well
        self.is_known = False
        self._value: Any = None

    def value(self) -> Any:
        """The value itself; waits."""
        if not self.is_known:
            nodes = list(self._unknown())
            if Deferred.needed is not None:
                for line in dict.fromkeys(node.line for node in nodes if node.line is not None):
                    Deferred.needed(line)
            for node in nodes:
                node._compute()
        return self._value

    def _unknown(self) -> Iterator[Deferred]:
        """All values that this one is made of and that are not known, those first that others need.

        No recursion: a sum over an epoch is as deep as the epoch is long.
        """
        stack, done = [self], set()
        while stack:
            node = stack[-1]
            parts = [part for part in node._arguments if isinstance(part, Deferred)]
            missing = [part for part in parts if not part.is_known and id(part) not in done]
            if missing:
                stack += missing
                continue
            stack.pop()
            if not node.is_known and id(node) not in done:
                done.add(id(node))
                yield node

    def lines(self) -> list[int]:
        """The lines that it was read in, where it is not known yet."""
        return [node.line for node in self._unknown() if node.line is not None] if not self.is_known else []

    def _compute(self) -> None:
        self._value = self._function(*(known(part) for part in self._arguments))
        self.is_known, self._arguments = True, ()

    def _later(self, function: Callable[..., Any], *parts: Any) -> Any:
        """An operation, deferred if all its operands are immutable."""
        if all(_can_wait(part) for part in parts) and any(_is_unknown(part) for part in parts):
            return Deferred(function, parts)
        return function(*(known(part) for part in parts))

    # Asking for the value

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __str__(self) -> str:
        return str(self.value())

    def __repr__(self) -> str:
        return repr(self.value())

    def __format__(self, form: str) -> str:
        return format(self.value(), form)

    def __hash__(self) -> int:
        return hash(self.value())

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __contains__(self, item: object) -> bool:
        return item in self.value()

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __setitem__(self, index: Any, item: Any) -> None:
        self.value()[index] = item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of every object
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        return np.asarray(self.value(), *args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Arithmetic with NumPy: as with the number itself, in the precision of the array."""
        if method == "__call__" and not kwargs:
            return self._later(ufunc, *inputs)
        return getattr(ufunc, method)(*map(known, inputs), **{name: _known_all(part) for name, part in kwargs.items()})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_known_all(args), **{name: _known_all(part) for name, part in (kwargs or {}).items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return known, (self.value(),)


def known(part: Any) -> Any:
    """The value itself, read if it was deferred."""
    return part.value() if isinstance(part, Deferred) else part


def _known_all(part: Any) -> Any:
    if isinstance(part, (list, tuple)):
        return type(part)(_known_all(item) for item in part) if type(part) in (list, tuple) else part
    return known(part)


def _is_unknown(part: object) -> bool:
    return isinstance(part, Deferred) and not part.is_known


def _can_wait(part: object) -> bool:
    if isinstance(part, Deferred):
        return part.is_known or part.is_number
    return isinstance(part, _IMMUTABLE) or (type(part).__module__ == "numpy" and not hasattr(part, "__setitem__"))


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def apply(self: Deferred, *others: Any) -> Any:
        parts = (*others, self) if swapped else (self, *others)
        return self._later(function, *parts)

    return apply


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
_BITS = ("lshift", "rshift", "and_", "or_", "xor")
_OF_ONE: dict[str, Callable[..., Any]] = {"abs": abs, "round": round}
_OF_ONE |= {"neg": operator.neg, "pos": operator.pos, "invert": operator.invert}
for _name in (*_COMPARISONS, *_ARITHMETIC, *_BITS):
    _function = getattr(operator, _name)
    setattr(Deferred, f"__{_name.rstrip('_')}__", _operator(_function))
    if _name not in _COMPARISONS:
        setattr(Deferred, f"__r{_name.rstrip('_')}__", _operator(_function, swapped=True))
for _name, _function in _OF_ONE.items():
    setattr(Deferred, f"__{_name}__", _operator(_function))
numbers.Number.register(Deferred)
