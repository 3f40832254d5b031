"""Batches small operations: casts of weights, and counters of batches.

Under autocast each weight is cast where its layer uses it, and each BatchNorm counts its batches: in ResNet-18 nearly
forty tiny kernels, each of which a GPU has to start and end. One operation over a list replaces all of a kind;
results are the same to the bit:

    a16 = _to_copy(a)                      a16, b16, c16 = empty, empty, empty
    ...                                    _foreach_copy_([a16, b16, c16], [a, b, c])
    b16 = _to_copy(b)                      ...
    ...                                    _foreach_add_([count1, count2], 1)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes.rewriting import Rewriting

_aten = torch.ops.aten


def cast_together(trace: Trace) -> Trace:
    """Move all casts of the caller's tensors to the place of the first one.

    The arguments of the first operation are cast separately: it does not wait for the weights of all later layers.
    """
    rewriting = Rewriting(trace)
    casts = [node for node in rewriting.nodes(_aten._to_copy.default) if _needs_nothing(node)]
    first = rewriting.takers(casts[0]) if casts else set()
    changed = False
    for group in _groups(node for node in casts[1:] if not first & rewriting.takers(node)):
        place = group[0]
        group = [node for node in group if rewriting.unchanged(node.args, place, node)]
        if len(group) < 2:
            continue
        with rewriting.graph.inserting_before(place):
            sources = [rewriting.node_of_input(node.args[0]) for node in group]
            results = [rewriting.empty(node.meta["val"]) for node in group]
            rewriting.call_in_place(_aten._foreach_copy_.default, (results, sources))
        for node, result in zip(group, results, strict=True):
            node.replace_all_uses_with(result)
            rewriting.graph.erase_node(node)
        changed = True
    return rewriting.done() if changed else trace


def _needs_nothing(node: Node) -> bool:
    """Whether a node casts one of the caller's tensors, and does nothing else."""
    source: Any = node.args[0]
    is_callers = source.op in ("get_attr", "placeholder") and isinstance(source.meta["val"], torch.Tensor)
    return is_callers and set(node.kwargs) == {"dtype"}


def _groups(nodes: Iterable[Node]) -> list[list[Node]]:
    """The nodes grouped by device and dtypes."""
    groups: dict[Any, list[Node]] = {}
    for node in nodes:
        before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
        groups.setdefault((after.device, before.dtype, after.dtype), []).append(node)
    return list(groups.values())


def count_together(trace: Trace) -> Trace:
    """Add to all counters at the place of the last one, unless something reads them earlier."""
    rewriting = Rewriting(trace)
    counts = [node for node in rewriting.nodes(_aten.add_.Tensor) if _is_count(node)]
    if len(counts) < 2:
        return trace
    last = counts[-1]
    groups: dict[Any, list[Node]] = {}
    for node in counts:
        if node is last or rewriting.untouched(node.args[:1], node, last):
            value: Any = node.all_input_nodes[0].meta["val"]
            groups.setdefault((value.device, node.args[1]), []).append(node)
    several = {key: group for key, group in groups.items() if len(group) > 1}
    for (_, amount), group in several.items():
        with rewriting.graph.inserting_after(last):
            rewriting.call_in_place(_aten._foreach_add_.Scalar, ([node.args[0] for node in group], amount))
    for node in itertools.chain(*several.values()):
        rewriting.graph.erase_node(node)
    return rewriting.done() if several else trace


def _is_count(node: Node) -> bool:
    """Whether a node only adds an integer to one of the caller's tensors that holds a single integer."""
    if node.target is not _aten.add_.Tensor:
        return False
    counter, amount = node.args[:2]
    if node.users or node.kwargs or type(amount) is not int or not isinstance(counter, Node):
        return False
    value = counter.meta["val"]
    return counter.op in ("get_attr", "placeholder") and not value.dim() and value.dtype is torch.int64
