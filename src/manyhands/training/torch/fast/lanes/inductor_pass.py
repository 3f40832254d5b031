"""The pass of :mod:`.compiled`: moves weight gradients to side lanes in the graph of a compiled backward pass.

A gradient moves if there are only casts, views and sums between it and the results of the backward pass. It is joined
at the end. Until then the compiler keeps all inputs of the lanes. If these are too large, the pass inserts earlier
joins, each for the oldest gradients, which are likely finished:

    dw1 = on_lane(g1, x1)     dw2 = on_lane(g2, x2)     join([dw1], [g1, x1])     dw3 = on_lane(g3, x3)     ...
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import sys
from typing import Any

import torch
from torch.fx import Graph, Node

from manyhands.backends.torch import compat
from manyhands.training.torch.fast.lanes import compiled, weight_gradients

_CustomGraphPass: Any = compat.custom_graph_pass()
_aten, _prims, _ops = torch.ops.aten, torch.ops.prims, torch.ops.manyhands
# Operations that are allowed between a gradient and the results of the backward pass.
_ALLOWED_AFTER = {
    operator.getitem,
    _prims.convert_element_type.default,
    _aten._to_copy.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.add.Tensor,
}


class MoveToSideLanes(_CustomGraphPass):  # type: ignore[misc]
    """Moves weight gradients to side lanes; for ``torch.compile``'s option ``post_grad_custom_post_pass``.

    About ``max_held`` bytes of the lanes' inputs are held; beyond that the main lane waits for the oldest work.
    Products of fewer than ``min_product`` multiplications stay on the main lane.
    """

    def __init__(self, max_held: int | None = None, min_product: int = 0) -> None:
        self._max_held, self._min_product = max_held, min_product

    def __call__(self, graph: Graph) -> None:
        if any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes):
            _move_to_side_lanes(graph, self._max_held, self._min_product)

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: it changes with the options and with the code of these files."""
        sources = [inspect.getsource(module) for module in (compiled, weight_gradients, sys.modules[__name__])]
        return hashlib.sha256(repr((self._max_held, self._min_product, sources)).encode()).digest()


def _move_to_side_lanes(graph: Graph, max_held: int | None, min_product: int) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    results: list[Node] = []
    groups: list[_Group] = [_Group()]
    for node in list(graph.nodes):
        if node.target is _aten.convolution_backward.default and node.args[-1][1]:
            gradients, last = _convolution(graph, node, len(results) + 1)
        elif node.target is _aten.mm.default and _multiplications(node) >= min_product:
            gradients, last = _product(graph, node, len(results) + 1)
        else:
            continue
        results += gradients
        groups[-1].add(gradients)
        if max_held is not None and groups[-1].bytes > max_held / 2:
            # The previous group is joined only now: its lanes could run during all of this group.
            if len(groups) > 1:
                groups[-2].join(graph, last.next)
            groups.append(_Group())
    if not results:
        return
    for group in groups[-2:]:
        group.join(graph, output)
    later = {node for node in _after(results) if node.target is not _ops.join_lanes.default}
    for node in [node for node in graph.nodes if node in later]:
        output.prepend(node)
    graph.lint()


class _Group:
    """Results that are joined together, and the inputs that they are computed from."""

    def __init__(self) -> None:
        self.results: list[Node] = []
        self._inputs: dict[Node, None] = {}
        self.bytes = 0

    def add(self, gradients: list[Node]) -> None:
        self.results += gradients
        for node in gradients:
            for source in node.args[0].all_input_nodes:  # type: ignore[union-attr]
                if source not in self._inputs:
                    self._inputs[source] = None
                    value = source.meta["val"]
                    self.bytes += value.numel() * value.element_size()

    def join(self, graph: Graph, before: Node) -> None:
        if self.results:
            with graph.inserting_before(before):
                graph.call_function(_ops.join_lanes.default, (self.results, list(self._inputs)))


def _convolution(graph: Graph, node: Node, lane: int) -> tuple[list[Node], Node]:
    """Move the gradients of weight and bias to a lane, unless the backward pass needs them; the input's stays.

    Returns the moved gradients, and the last operation that replaces the old one. The lane forks off before the
    gradient of the input, so that it does not wait for it.
    """
    arguments: Any = node.args
    *arguments_before, (for_input, _, for_bias) = arguments
    parts: dict[Any, Node] = {user.args[1]: user for user in node.users}
    wanted = [parts[number] for number in (1, 2) if number in parts]
    if 1 not in parts or not all(node_after.target in _ALLOWED_AFTER for node_after in _after(wanted)):
        return [], node
    dtype = _common_cast(wanted)
    with graph.inserting_before(node):
        arguments_on_lane = (lane, dtype, *arguments_before, for_bias and 2 in parts)
        last = on_lane = graph.call_function(_ops.convolution_on_lane.default, arguments_on_lane)
        if for_input and 0 in parts:
            last = graph.call_function(node.target, (*arguments_before, [True, False, False]))  # type: ignore[arg-type]
            last.meta["val"] = (node.meta["val"][0], None, None)
            parts[0].replace_input_with(node, last)
    gradients = _replace_results(graph, wanted, on_lane, dtype)
    graph.erase_node(node)
    return gradients, gradients[-1] if last is on_lane else last


def _multiplications(node: Node) -> int:
    left, right = (factor.meta["val"] for factor in node.all_input_nodes[:2])
    return weight_gradients.multiplications(left, right)


def _product(graph: Graph, node: Node, lane: int) -> tuple[list[Node], Node]:
    """Move a product to a lane, if only results of the backward pass need it."""
    if not all(after.target in _ALLOWED_AFTER for after in _after([node])):
        return [], node
    dtype = _common_cast([node])
    with graph.inserting_before(node):
        on_lane = graph.call_function(_ops.product_on_lane.default, (lane, dtype, *node.args))
    gradients = _replace_results(graph, [node], on_lane, dtype)
    return gradients, gradients[-1]


def _replace_results(graph: Graph, wanted: list[Node], on_lane: Node, dtype: torch.dtype | None) -> list[Node]:
    """Replace the old results (and casts of them to ``dtype``) by those of the call on the side lane."""
    values = [node.meta["val"] for node in wanted]
    on_lane.meta["val"] = [value if dtype is None else value.to(dtype) for value in values]
    parts = []
    for number, old in enumerate(wanted):
        with graph.inserting_after(on_lane):
            part = graph.call_function(operator.getitem, (on_lane, number))
        part.meta["val"] = on_lane.meta["val"][number]
        for cast in list(old.users) if dtype is not None else []:
            cast.replace_all_uses_with(part)
            graph.erase_node(cast)
        old.replace_all_uses_with(part)
        graph.erase_node(old)
        parts.append(part)
    return parts


def _common_cast(wanted: list[Node]) -> torch.dtype | None:
    """The dtype to which all users cast these results, so that the lane can cast; None if there is no such dtype."""
    users = [user for node in wanted for user in node.users]
    if not all(user.target is _prims.convert_element_type.default for user in users):
        return None
    dtypes = {user.args[1] for user in users}
    return dtypes.pop() if len(dtypes) == 1 else None  # type: ignore[return-value]


def _after(nodes: list[Node]) -> set[Node]:
    """All nodes that depend on these nodes, except the output."""
    following: set[Node] = set()
    left = list(nodes)
    while left:
        for user in left.pop().users:
            if user.op != "output" and user not in following:
                following.add(user)
                left.append(user)
    return following
