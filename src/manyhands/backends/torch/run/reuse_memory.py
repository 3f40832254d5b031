"""Matrix products that write to memory that their lane no longer needs, instead of allocating new memory.

A chain of products allocates and frees a matrix at every step. If a lane no longer needs a result and its next task is
a product of the same shape, strides and dtype, the product is written there (`docs/performance.md` has the gain):

    b = mm(a, w)                    b = mm(a, w)
    c = mm(b, w)                    c = mm(b, w)
    del b                           d = mm(c, w, out=b)
    d = mm(c, w)                    del b

The same kernel gives the same numbers. No memory is held longer: reuse is decided when the code is generated, and only
between a task and the next one of its lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Step, Trace
from manyhands.backends.torch.compat import OpOverload

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default)


class Reuse:
    """Finds results whose memory a product can be written to."""

    def __init__(self, trace: Trace, shared: Collection[Any]) -> None:
        """``shared``: values that are visible outside their lane."""
        self._trace, self._shared = trace, shared
        holders: dict[int, int] = {}
        for memories in trace.storages.values():
            for memory in memories:
                holders[memory] = holders.get(memory, 0) + 1
        self._holders = holders

    def into(self, gone: Iterable[Node], following: Step) -> Node | None:
        """One of the values that are no longer needed to which the lane's following step can be written."""
        if len(following.nodes) != 1 or following.node.target not in _PRODUCTS:
            return None
        wanted = _form(following.node)
        return next((node for node in gone if self._is_own(node) and _form(node) == wanted), None)

    def _is_own(self, node: Node) -> bool:
        """Whether a value is a product in fresh memory that only this lane and PyTorch's operations have seen.

        A custom operation may have kept a reference, and a compiled region may have returned its argument as a result.
        """
        (memory, *others) = self._trace.storages.get(node, frozenset()) or (-1,)
        alone = not others and self._holders.get(memory) == 1
        return alone and node.target in _PRODUCTS and node not in self._shared and all(map(_is_pytorchs, node.users))


def _is_pytorchs(user: Node) -> bool:
    return isinstance(user.target, OpOverload) and user.target.namespace in ("aten", "prims")


def _form(node: Node) -> Any:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype, value.device
