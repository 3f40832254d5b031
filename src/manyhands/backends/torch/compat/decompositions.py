"""Decomposes a pure graph into the operations that Inductor knows.

Tracing the whole graph with ``make_fx`` and Inductor's table does the same, in twice the time: here an operation on
tensors of the same forms is traced once, and nets repeat their layers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

_COPY = torch.ops.aten.copy_.default


def decomposed(module: GraphModule, inputs: Sequence[Any]) -> GraphModule | None:
    """The graph in the operations that Inductor knows, for these fake tensors; each node knows its result.

    None if a decomposition has constants.
    """
    try:
        with inputs[0].fake_mode:
            graph = _Decomposing(inputs).graph_of(module)
    except _HasConstants:
        return None
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target is _COPY)
    return GraphModule({}, graph)


class _HasConstants(Exception):
    pass


class _Decomposing:
    def __init__(self, inputs: Sequence[Any]) -> None:
        from torch._inductor.decomposition import select_decomp_table

        self._table = select_decomp_table()
        self._inputs = iter(inputs)
        self._graph = Graph()
        self._parts: dict[Any, Graph] = {}  # by an operation and the forms of its arguments

    def graph_of(self, module: GraphModule) -> Graph:
        new: dict[Node, Any] = {}  # a node, or what an operation with several results was decomposed into
        for node in module.graph.nodes:
            if node.op == "placeholder":
                new[node] = self._graph.placeholder(node.name)
                new[node].meta["val"] = next(self._inputs)
            elif node.op == "output":
                self._graph.output(map_arg(node.args[0], new.__getitem__))
            elif node.target is operator.getitem and not isinstance(new[node.args[0]], Node):
                new[node] = new[node.args[0]][node.args[1]]
            else:
                arguments: Any = map_arg((node.args, node.kwargs), new.__getitem__)
                decompose = node.target in self._table or getattr(node.target, "_can_decompose", bool)()
                new[node] = (self._decompose if decompose else self._call)(node.target, *arguments)
        return self._graph

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        node = self._graph.call_function(target, args, kwargs)
        values: Any = map_arg((args, kwargs), lambda argument: argument.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def _decompose(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the operations that a call consists of; return the nodes of its results in their structure."""
        leaves, structure = tree_flatten((args, kwargs))
        nodes = [leaf for leaf in leaves if isinstance(leaf, Node)]
        key = target, str(structure), *map(_form, leaves)
        if key not in self._parts:
            self._parts[key] = self._traced(target, leaves, structure, nodes)
        new: dict[Node, Any] = {}
        arguments = iter(nodes)
        for node in self._parts[key].nodes:
            if node.op == "placeholder":
                new[node] = next(arguments)
            elif node.op == "output":
                return map_arg(node.args[0], new.__getitem__)
            else:
                inner: Any = map_arg((node.args, node.kwargs), new.__getitem__)
                new[node] = self._call(node.target, *inner)
        raise AssertionError("a graph without an output")

    def _traced(self, target: Any, leaves: Sequence[Any], structure: Any, nodes: Sequence[Node]) -> Graph:
        from torch.fx.experimental.proxy_tensor import make_fx

        def call(*tensors: torch.Tensor) -> Any:
            values = iter(tensors)
            args, kwargs = tree_unflatten(
                [next(values) if isinstance(leaf, Node) else leaf for leaf in leaves], structure
            )
            return target(*args, **kwargs)

        graph = make_fx(call, decomposition_table=self._table)(*(node.meta["val"] for node in nodes)).graph
        if any(node.op == "get_attr" for node in graph.nodes):
            raise _HasConstants
        graph.eliminate_dead_code()
        return graph


def _form(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, Node):
        return type(leaf), repr(leaf)
    value = leaf.meta["val"]
    return tuple(value.shape), value.stride(), value.dtype, value.device
