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
