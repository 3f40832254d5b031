"""Memory by its addresses: two objects whose spans overlap share memory, however they were created.

``a = np.zeros(8)``, ``torch.from_numpy(a)`` and ``torch.from_numpy(a[4:])`` are three objects in one memory. None of
them refers to the others; only their addresses show it.
"""

from __future__ import annotations

import array
import ctypes
import operator
import sys
from collections.abc import Hashable, Iterable, Set
from typing import Any, NamedTuple

_BLOCK = 64  # bytes
_BUFFERS = (bytearray, memoryview, array.array)


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
    """Compares equal only for the same object; keeps a reference, so that no other object gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class AddressRange(NamedTuple):
    """A range of addresses; the end is excluded."""

    start: int
    end: int


def share(memories: Iterable[Hashable], held: Set[Hashable]) -> bool:
    """Whether any of the first memories overlaps with the second."""
    for memory in memories:
        if memory in held:
            return True
        if type(memory) is AddressRange and any(
            memory.start < other.end and other.start < memory.end for other in held if type(other) is AddressRange
        ):
            return True
    return False


def join(spans: Iterable[AddressRange]) -> list[AddressRange]:
    """The same memory as sorted spans; overlapping spans are merged."""
    merged: list[AddressRange] = []
    for span in sorted(spans):
        if merged and span.start < merged[-1].end:
            merged[-1] = AddressRange(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def content(span: AddressRange, whole: int, blocks: int) -> bytes:
    """The content of this memory: all of it up to ``whole`` bytes, else ``blocks`` blocks at equal distances."""
    size = span.end - span.start
    if size <= whole:
        return ctypes.string_at(span.start, size)
    step = (size - _BLOCK) // (blocks - 1)
    return b"".join(ctypes.string_at(span.start + number * step, _BLOCK) for number in range(blocks))


def is_array(value: object) -> bool:
    """Whether it is a NumPy array, or a buffer of Python's."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _BUFFERS) or (numpy is not None and isinstance(value, numpy.ndarray))


def span_of(array: Any) -> AddressRange | None:
    """The addresses of a NumPy array or a buffer; None if it has no bytes, or is a buffer that cannot be written to."""
    if isinstance(array, _BUFFERS):
        with memoryview(array) as view:
            if view.readonly or not view.nbytes or not view.c_contiguous:
                return None
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            return AddressRange(start, start + view.nbytes)
    start, size = array.ctypes.data, array.nbytes
    if not size:
        return None
    if array.flags.forc:
        return AddressRange(start, start + size)
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    below, above = sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    return AddressRange(start + below, start + above + array.itemsize)
