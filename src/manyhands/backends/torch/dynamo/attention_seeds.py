"""The seeds that attention returns for its backward pass, where there is no dropout: zeros instead of anything.

Attention kernels on a GPU return the state of the random generator along with their result, so that the backward pass
can draw the same dropout again. Without dropout PyTorch leaves that memory as it was allocated: two calls return
different numbers, and nobody reads them. As results of a forward graph they would make every plan look wrong.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_SEEDS = {"rng_state", "unused", "philox_seed", "philox_offset", "debug_attn_mask"}


def define_seeds(module: GraphModule) -> GraphModule:
    """The same graph, in which seeds that no dropout needs are zeros."""
    seeds = [node for node in module.graph.nodes if _is_seed_of_nothing(node)]
    if not seeds:
        return module
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in seeds:
            new[node] = _zeros(graph, node)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    return GraphModule(module, graph)


def _is_seed_of_nothing(node: Node) -> bool:
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source, number = node.args
    schema = getattr(source.target, "_schema", None) if isinstance(source, Node) else None
    if schema is None or not isinstance(source, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return schema.returns[number].name in _SEEDS and _dropout(source, schema) == 0


def _dropout(node: Node, schema: Any) -> Any:
    """The dropout of an attention; None for other operations."""
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            return node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
    return None


def _zeros(graph: Graph, node: Node) -> Node:
    value = node.meta["val"]
    how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    made = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), how)
    made.meta = dict(node.meta)
    return made
