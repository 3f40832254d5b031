"""What explicit tasks ask of a framework."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hooks:
    """The answers of a framework; by default those for Python's own objects.

    Attributes:
        memory_of: The same key for objects that share memory, or a :class:`~manyhands.addresses.Span`: then a write to
            one is a write to the other.
        parts_of: What else is read and written with an object (a module: its parameters); None: it is not the
            framework's.
        version_of: Something that every write to one of the framework's objects changes; None: that is not known.
        bound: Applied to each function in the thread that submits the task, to carry over that thread's state (a
            framework's modes).
        exclusive: Those of the framework's objects that change inside when they are only used (a block that is traced
            at its first call): tasks that share one run one after the other, in any order.
    """

    memory_of: Callable[[object], Hashable] = id
    parts_of: Callable[[object], Collection[object] | None] = lambda value: None
    version_of: Callable[[object], object] = lambda value: None
    bound: Callable[[Callable[..., object]], Callable[..., object]] = lambda function: function
    exclusive: Callable[[list[object]], Collection[object]] = lambda objects: ()
