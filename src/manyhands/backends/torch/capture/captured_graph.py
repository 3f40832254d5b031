"""Graphs that ``aot_autograd`` has captured: they are described as they are, because tracing again takes seconds.

Each node of such a graph knows the form and the memory of its result (``meta["val"]``), as a trace does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import why
from manyhands.backends.torch.capture.trace import Trace, trace_of_graph
from manyhands.backends.torch.compat import FakeTensor, tensors_in, tree_leaves
from manyhands.backends.torch.passes import split_convolutions
from manyhands.errors import CannotTrace

_SYMBOLIC = torch.SymInt, torch.SymFloat, torch.SymBool


class CapturedGraph(GraphModule):
    """A graph of ATen operations that returns a tuple, and whose nodes know their results."""


def trace_captured(graph: CapturedGraph, arguments: Sequence[Any]) -> Trace:
    """The trace of a captured graph for these arguments, numbers among them."""
    return split_convolutions(_as_captured(graph, arguments) or _traced_again(graph, arguments))


def _traced_again(graph: CapturedGraph, arguments: Sequence[Any]) -> Trace:
    """The trace of a graph that was captured for arguments of other forms, or for any form."""
    tensors = tensors_in(arguments)

    def flat(*stand_ins: torch.Tensor) -> list[Any]:
        left = iter(stand_ins)
        return list(graph(*(next(left) if isinstance(value, torch.Tensor) else value for value in arguments)))

    try:
        with compat.tracing, torch.no_grad(), compat.no_autocast():
            module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    except Exception as error:
        raise CannotTrace(why(error)) from error
    return trace_of_graph(module)


def _as_captured(function: CapturedGraph, tensors: Sequence[Any]) -> Trace | None:
    """The trace of the graph's own nodes; None if the forms of its arguments are not known, or not these."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    nodes = function.graph.nodes
    arguments = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    if len(arguments) != len(tensors) or not all(map(_is_known, nodes)):
        return None
    if any(
        compat.tensor_form(argument) != compat.tensor_form(tensor)
        for argument, tensor in zip(arguments, tensors, strict=True)
    ):
        return None
    graph = Graph()
    results = cast(tuple[Any, ...], graph.graph_copy(function.graph, {}))
    graph.output(list(results))
    return trace_of_graph(compat.graph_module(function, graph))


def _is_known(node: Node) -> bool:
    """Whether the results of a node are known, and none of their sizes is symbolic.

    Not those of operations that call functions, such as a branch: what these read and write is not in the graph.
    """
    if node.op == "output":
        return True
    if node.op == "get_attr":
        return isinstance(getattr(node.graph.owning_module, str(node.target), None), torch.Tensor)
    if node.op == "call_function" and compat.schema(node.target) is None and node.target is not operator.getitem:
        return False
    if "val" not in node.meta or (node.op == "placeholder" and not isinstance(node.meta["val"], FakeTensor)):
        return False
    values, tensors = tree_leaves(node.meta["val"]), tensors_in(node.meta["val"])
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False
    sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    return not any(isinstance(value, _SYMBOLIC) for value in (*values, *sizes))
