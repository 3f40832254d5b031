"""Casts that need nothing before them, made together: one kernel instead of one for each.

Under autocast every weight is cast before it is used, and most of these casts are kernels of next to no work, which
take as long as a kernel takes to start. They need nothing but the weights, so they could all have begun at once; done
as one operation they begin at once. Only what the first large operation is waiting for is left alone:

    x16 = cast(x)   w16 = cast(w)   y = convolution(x16, w16)   v16, u16 = casts(v, u)   z = convolution(y, v16) ...

The convolution ``y`` does not wait for the weights of all later layers, and on another lane they are cast meanwhile.
A compiler of pure regions would make a kernel of each again: they are of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Step, Trace

_aten = torch.ops.aten


def casts_together(
    trace: Trace, wanted: Sequence[set[int]], small: Sequence[bool], alone: Sequence[int]
) -> list[list[int]]:
    """Those of these steps that are casts and need nothing, in groups of one kind."""
    kinds: dict[Any, list[int]] = {}
    for index in alone:
        step = trace.steps[index]
        if not wanted[index] and _only_casts(step):
            before, after = (node.meta["val"] for node in (*step.node.all_input_nodes, step.node))
            kinds.setdefault((after.device, before.dtype, after.dtype), []).append(index)
    casts = {index for group in kinds.values() for index in group}
    first = next((earlier for index, earlier in enumerate(wanted) if not small[index] and earlier & casts), set[int]())
    groups = [[index for index in group if index not in first] for group in kinds.values()]
    return [group for group in groups if len(group) > 1]


def _only_casts(step: Step) -> bool:
    return step.node.target is _aten._to_copy.default and set(step.node.kwargs) == {"dtype"}


def at_once(module: GraphModule, metas: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A compiler of casts alone: all of them are one operation, and their results are in the form that was traced."""
    places = {node: number for number, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    (results,) = next(iter(module.graph.find_nodes(op="output"))).args
    sources = [places[node.args[0]] for node in results]
    values = [node.meta["val"] for node in results]
    forms = [(tuple(value.shape), value.stride(), value.dtype, value.device) for value in values]

    def cast(*given: torch.Tensor) -> Any:
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=on) for shape, stride, dtype, on in forms]
        compat.foreach_copy_(made, [given[source] for source in sources])
        return made

    return cast
