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

from manyhands.backends.torch.compat.fake_tensors import tensor_form


def decomposed(module: GraphModule, inputs: Sequence[Any]) -> GraphModule | None:
    """The graph in the operations that Inductor knows, for these fake tensors; each node knows its result.

    None if a decomposition has constants.
    """
    try:
        with inputs[0].fake_mode:
            graph = _Decomposing(inputs).graph_of(module)
    except _HasConstants:
        return None
    graph.eliminate_dead_code(_has_effect)
    return GraphModule({}, graph)


def _has_effect(node: Node) -> bool:
    """Whether a node must stay although nobody uses its result: it writes, or has no result, as a check."""
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and (schema.is_mutable or not schema.returns))


def _is_composite(target: Any) -> bool:
    """Whether PyTorch defines an operation by others, for all devices and for gradients."""
    kernel = "CompositeImplicitAutograd"
    named = isinstance(target, torch._ops.OpOverload)
    return named and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), kernel)


class _HasConstants(Exception):
    """A decomposition uses a tensor that is not an argument."""


class _Decomposing:
    """Writes a new graph, and remembers how operations were decomposed."""

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
                write = self._decompose if node.target in self._table or _is_composite(node.target) else self._call
                new[node] = write(node.target, *arguments)
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
        first = [nodes.index(node) for node in nodes]  # a decomposition may be another if two arguments are one tensor
        key = target, str(structure), *first, *map(_form, leaves)
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

        tensors = {node: node.meta["val"].detach() for node in nodes}  # make_fx knows arguments by the object
        graph = make_fx(call, decomposition_table=self._table)(*(tensors[node] for node in nodes)).graph
        if any(node.op == "get_attr" for node in graph.nodes):
            raise _HasConstants
        graph.eliminate_dead_code(_has_effect)
        return graph


def _form(leaf: Any) -> tuple[Any, ...]:
    return tensor_form(leaf.meta["val"]) if isinstance(leaf, Node) else (type(leaf), repr(leaf))
