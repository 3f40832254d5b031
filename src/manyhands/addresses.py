"""Memory by its addresses: two objects whose spans overlap share memory, however each came by it.

``a = np.zeros(8)``, ``torch.from_numpy(a)`` and ``torch.from_numpy(a[4:])`` are three objects in one memory, and none
of them names the others. Their addresses do.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Hashable, Iterable, Set
from typing import Any, NamedTuple

_BLOCK = 64  # bytes


class Held:
    """Objects that something holds: equal to others if they are the very same ones."""

    __slots__ = ("_objects",)

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held) or len(self._objects) != len(other._objects):
            return False
        return all(map(operator.is_, self._objects, other._objects))

    __hash__ = None  # type: ignore[assignment]


class Same:
    """An object that equals only itself; it is kept, so that no other can come to its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Span(NamedTuple):
    """Addresses of bytes, the end excluded."""

    start: int
    end: int


def share(memories: Iterable[Hashable], held: Set[Hashable]) -> bool:
    """Whether something of the first is in the memory of the second."""
    for memory in memories:
        if memory in held:
            return True
        if type(memory) is Span and any(
            memory.start < other.end and other.start < memory.end for other in held if type(other) is Span
        ):
            return True
    return False


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same memory in order, with one span where several overlap."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start < merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def content(span: Span, whole: int, blocks: int) -> bytes:
    """What is in this memory: all of it up to ``whole`` bytes, beyond that some blocks at equal distances."""
    size = span.end - span.start
    if size <= whole:
        return ctypes.string_at(span.start, size)
    step = (size - _BLOCK) // (blocks - 1)
    return b"".join(ctypes.string_at(span.start + number * step, _BLOCK) for number in range(blocks))


def span_of_array(array: Any) -> Span | None:
    """Where a NumPy array lies, from its first byte to its last; None where it has none."""
    start, size = array.ctypes.data, array.nbytes
    if not size:
        return None
    if array.flags.forc:
        return Span(start, start + size)
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    below, above = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    return Span(start + below, start + above + array.itemsize)


def span_of_buffer(buffer: Any) -> Span | None:
    """Where the bytes of a ``bytearray``, ``array`` or ``memoryview`` lie; None where nobody can write to them."""
    with memoryview(buffer) as view:
        if view.readonly or not view.nbytes or not view.c_contiguous:
            return None
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return Span(start, start + view.nbytes)
