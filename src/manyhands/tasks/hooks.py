"""What explicit tasks ask of a framework."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hooks:
    """The answers of a framework; by default those for Python's own objects.

    Attributes:
        memory_of: The same key for objects that share memory, or a :class:`~manyhands.addresses.Span`: then a write to
            one is a write to the other.
        parts_of: What else is read and written with an object; None: its attributes.
        version_of: Something that every write to an object changes, or None.
        bound: Applied to each function in the thread that submits the task, to carry over that thread's state (a
            framework's modes).
        exclusive: Given the objects that a task reaches and the words in its code, those objects that change inside
            when they are only used (a block that is traced at its first call): tasks that share one run one after the
            other, in any order.
    """

    memory_of: Callable[[object], Hashable] = id
    parts_of: Callable[[object], Collection[object] | None] = lambda value: None
    version_of: Callable[[object], object] | None = None
    bound: Callable[[Callable[..., object]], Callable[..., object]] | None = None
    exclusive: Callable[[list[object], Set[str]], Collection[object]] | None = None
