"""Reads many words of memory as one NumPy array: the fields of thousands of objects in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_WORD = 8


def reader(addresses: Sequence[int]) -> Callable[[], bytes]:
    """A function that reads the words at these addresses, multiples of eight. The caller keeps that memory alive."""
    first = min(addresses)

    class Memory:
        """All memory between the addresses; nothing else of it is read."""

        __array_interface__ = {  # noqa: RUF012
            "shape": ((max(addresses) - first) // _WORD + 1,),
            "typestr": "=u8",
            "data": (first, True),
            "version": 3,
        }

    memory, places = np.asarray(Memory()), (np.array(addresses, np.int64) - first) // _WORD
    return lambda: memory[places].tobytes()
