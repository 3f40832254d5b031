"""The few functions that experiments need from every framework, in a module ``lab/<framework>/operations.py`` each.

Each function computes on the device of its first argument. A function that two experiments need belongs here, unless a
door offers it (``mh.to``, ``mh.parallel``, ...).
"""

from __future__ import annotations

from typing import Any, Protocol


class Operations(Protocol):
    def tensor(self, values: Any, /) -> Any:
        """A NumPy array as a tensor on the host."""

    def numpy(self, value: Any, /) -> Any:
        """A tensor as a NumPy array (or number); other values unchanged."""

    def matmul(self, left: Any, right: Any, /) -> Any: ...

    def norm(self, x: Any, /) -> Any:
        """The Frobenius norm, as a tensor on the device of ``x``."""

    def relu(self, x: Any, /) -> Any: ...

    def transpose(self, x: Any, /) -> Any: ...

    def join(self, tensors: Any, /) -> Any:
        """All tensors, flattened and concatenated; they are on one device."""

    def cut(self, joined: Any, shapes: Any, /) -> Any:
        """The inverse of ``join``: a list of tensors of these shapes."""

    def number(self, x: Any, index: int, /) -> float:
        """The number in row 0 and this column of a matrix, on the host."""

    def with_number(self, x: Any, index: int, value: float, /) -> Any:
        """The matrix with another number in row 0 and this column; changed in place if possible, else a copy."""

    def pin(self, x: Any, /) -> Any:
        """A copy in page-locked memory of the host; None if the framework has no such memory."""
