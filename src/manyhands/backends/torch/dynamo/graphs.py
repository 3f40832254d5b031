"""The graphs that Dynamo and aot_autograd capture: rewritten before they are planned, and described as traces.

Dynamo's graph keeps checks although nothing reads them. In the pure graphs of aot_autograd, copies that only pass a
value on go, and what is planned is cut out of them.

Each node of a captured graph knows the form and the memory of its result (``meta["val"]``), as a trace does: graphs
are described as they are, because tracing again takes seconds.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import has_side_effect

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import why
from manyhands.backends.torch.capture.trace import Trace, has_effects, trace_of_graph
from manyhands.backends.torch.compat import FakeTensor, tensors_in, tree_leaves
from manyhands.backends.torch.passes import split_convolutions
from manyhands.errors import CannotTrace

_SYMBOLIC = torch.SymInt, torch.SymFloat, torch.SymBool
_aten = torch.ops.aten


class CapturedGraph(GraphModule):
    """A graph of ATen operations that returns a tuple, and whose nodes know their results."""


# Rewrites


def detach(module: GraphModule, numbers: Sequence[int]) -> None:
    """Detach results that were differentiated in the graph: it needs no backward pass."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    results: Any = list(output.args[0])
    with module.graph.inserting_before(output):
        for number in numbers:
            results[number] = module.graph.call_method("detach", (results[number],))
    output.args = (tuple(results),)
    module.recompile()


def keep_effects(module: GraphModule) -> None:
    """Mark operations without results as having an effect: PyTorch would remove them as dead code."""
    for node in module.graph.nodes:
        operation = getattr(node.target, "default", node.target)  # of torch.ops.library.name
        if isinstance(operation, compat.OpOverload) and not compat.schema(operation).returns:
            has_side_effect(operation)


def only_detaches(module: GraphModule) -> bool:
    """Whether a graph computes nothing: what is left of a step after its optimizer."""
    return all(node.target == "detach" for node in module.graph.nodes if node.op.startswith("call_"))


def take_gradients(module: GraphModule) -> None:
    """Give gradients as they are computed, where they have new memory of their own in the layout of their parameter.

    Dynamo copies every gradient into memory like its parameter's; autograd would take most of them as they are.
    """
    nodes = module.graph.nodes
    outputs: Any = next(node for node in nodes if node.op == "output").args[0]
    arguments = {memory for node in nodes if node.op == "placeholder" for memory in memories(node)}
    used = Counter(memory for value in outputs for memory in memories(value))
    used.update(memory for node in nodes if node.target is _aten.copy.default for memory in memories(node.args[1]))
    for node in [node for node in nodes if node.target is _aten.copy.default]:
        into, source = node.args[:2]
        (memory,) = memories(source) or (0,)
        is_own = into.target is _aten.empty_like.default and memory not in arguments and used[memory] == 1
        if is_own and _is_dense_like(source.meta["val"], node.meta["val"]):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
            if not into.users:
                module.graph.erase_node(into)
    module.recompile()


def _is_dense_like(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, in the same form as another."""
    size = value.untyped_storage().nbytes()
    fills = isinstance(size, int) and size == value.numel() * value.element_size()
    return fills and compat.tensor_form(value) == compat.tensor_form(wanted)


def is_computed(value: Any, of_arguments: set[int]) -> bool:
    """Whether a result is a tensor in new memory."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return False
    return not memories(value) & of_arguments


def is_nothing(value: Any) -> bool:
    """Whether a result is None: its operation has not computed it."""
    return value is None or (isinstance(value, Node) and "val" in value.meta and value.meta["val"] is None)


def memories(node: Any) -> set[int]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return {compat.memory_id(value)} if isinstance(value, torch.Tensor) else set()


def has_effect(node: Node) -> bool:
    return node.op == "call_function" and (node.is_impure() or has_effects(node))


def replaces_memory(node: Node) -> bool:
    """Whether a tensor gets other memory (``w.data = ...``)."""
    return getattr(node.target, "overloadpacket", None) in (_aten.set_, _aten.resize_, _aten.resize_as_)


def part(
    module: GraphModule, outputs: Sequence[Any], name: str = "a graph", *, with_effects: bool = False
) -> CapturedGraph:
    """A graph of the same arguments for some of the results, with only the operations that these need.

    ``with_effects`` adds operations with effects: a check of values, a write to an argument.
    """
    needed = {value for value in outputs if isinstance(value, Node)}
    needed |= {node for node in module.graph.nodes if with_effects and has_effect(node)}
    left = list(needed)
    while left:
        sources = set(left.pop().all_input_nodes) - needed
        needed |= sources
        left += sources
    graph, new = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[value] if isinstance(value, Node) else value for value in outputs))
    return CapturedGraph(module, graph, name)


# Traces


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
        with compat.compiling(), torch.no_grad(), compat.no_autocast():
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
