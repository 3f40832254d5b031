"""The few functions that experiments need of every framework: a module ``lab/<framework>/operations.py`` has them.

Each computes on the device of its (first) argument, as its framework does it. What two experiments need belongs here;
what a door offers (``mh.to``, ``mh.parallel``, ...) does not.
"""

from __future__ import annotations

from typing import Any, Protocol


class Operations(Protocol):
    def tensor(self, values: Any, /) -> Any:
        """A tensor of a NumPy array's numbers, on the host."""

    def numpy(self, value: Any, /) -> Any:
        """A NumPy array (or number) of a tensor's numbers; other values as they are."""

    def matmul(self, left: Any, right: Any, /) -> Any: ...

    def norm(self, x: Any, /) -> Any:
        """The Frobenius norm, as a tensor on the device of ``x``."""

    def relu(self, x: Any, /) -> Any: ...

    def transpose(self, x: Any, /) -> Any: ...

    def join(self, tensors: Any, /) -> Any:
        """All numbers of some tensors of one device, as one tensor with one dimension."""

    def cut(self, joined: Any, shapes: Any, /) -> Any:
        """The inverse of ``join``: a list of tensors of these shapes."""

    def number(self, x: Any, index: int, /) -> float:
        """The number in row 0 and this column of a matrix, on the host."""

    def with_number(self, x: Any, index: int, value: float, /) -> Any:
        """The matrix with another number in row 0 and this column: itself where it can be changed in place."""

    def pin(self, x: Any, /) -> Any:
        """The same numbers in page-locked memory of the host; None where the framework offers none."""
