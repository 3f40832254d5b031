"""Replaces in-place operations of a trace by pure ones, if the difference is not observable.

Nets save memory with ``relu(inplace=True)`` and ``out += identity``. In a trace these are writes, and the operation
whose result they overwrite cannot be compiled with others, because its result is lost.

    y = batch_norm(x)                      y = batch_norm(x)
    y' = relu_(y)                          z = relu(y)
    w = convolution(y)                     w = convolution(z)

Every operation after the write uses the new result. Not replaced: a write to memory of the caller, a write to memory
that has other views, and a write whose pure counterpart returns another dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import HIDDEN_VIEWS, Trace
from manyhands.backends.torch.compat import FakeTensorMode, OpOverload
from manyhands.backends.torch.passes.fusible import like, tensors


def make_out_of_place(trace: Trace) -> Trace:
    """The trace with these operations replaced; the same object if there are none."""
    pure_ones = _replaceable(trace)
    if not pure_ones:
        return trace
    graph, new = trace.copied_graph()
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node, pure in pure_ones.items():
        _replace(graph, new[node], pure, place)
    return trace.rewritten(graph)


def _replaceable(trace: Trace) -> dict[Node, OpOverload]:
    """The in-place operations in program order, each with its pure counterpart."""
    candidates: dict[Node, OpOverload] = {}
    for step in trace.steps:
        pure = _pure(step.node)
        if pure is not None and _gives_the_same(pure, step.node):
            candidates[step.node] = pure
    of_caller = trace.callers_memories()
    shared: set[int] = set()  # memories that have views or other writes
    for step in trace.steps:
        if step.node in candidates and not trace.storages[step.node] & of_caller:
            continue
        schema = compat.schema(step.node.target)
        aliases = schema is None or any(entry.alias_info is not None for entry in (*schema.arguments, *schema.returns))
        if aliases or step.node in candidates or step.node.target in HIDDEN_VIEWS:
            touched = [step.node, *step.nodes, *step.node.all_input_nodes]
            shared |= {memory for node in touched for memory in _memories(node)}
    return {node: pure for node, pure in candidates.items() if not _memories(node) & shared}


def _memories(node: Node) -> set[int]:
    return {compat.memory_id(value) for value in tensors(node)}


def _pure(node: Node) -> OpOverload | None:
    """The operation that returns what this one writes to its first argument."""
    target: Any = node.target
    schema = compat.schema(target)
    if schema is None or not schema.is_mutable or not node.args or not isinstance(node.args[0], Node):
        return None
    name = schema.name.removeprefix("aten::")
    written = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not name.endswith("_") or name.startswith("_") or written != [schema.arguments[0].name]:
        return None
    pure = getattr(getattr(torch.ops.aten, name[:-1], None), schema.overload_name or "default", None)
    of_pure = compat.schema(pure)
    if not isinstance(pure, OpOverload) or of_pure.is_mutable or torch.Tag.nondeterministic_seeded in pure.tags:
        return None
    same = [argument.name for argument in of_pure.arguments] == [argument.name for argument in schema.arguments]
    return pure if same and len(of_pure.returns) == 1 else None


def _gives_the_same(pure: OpOverload, node: Node) -> bool:
    """Whether the result has the form of the tensor written to: ``bfloat16 += float32`` is not replaced."""
    value = node.meta["val"]
    try:
        with compat.no_dispatch_modes(), torch.no_grad(), FakeTensorMode():
            arguments, named = map_arg((node.args, node.kwargs), _substitute)
            result = pure(*arguments, **named)
    except Exception:  # the operation does not support fake tensors
        return False
    return (result.shape, result.stride(), result.dtype, result.device) == (
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
    )


def _substitute(node: Node) -> Any:
    meta = node.meta["val"]
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=meta.device)


def _replace(graph: Graph, node: Node, pure: OpOverload, place: dict[Node, int]) -> None:
    source: Any = node.args[0]
    with graph.inserting_before(node):
        result = graph.call_function(pure, node.args, node.kwargs)
    result.meta = {**node.meta, "val": like(node.meta["val"])}
    node.replace_all_uses_with(result)
    for user in list(source.users):
        if place.get(user, -1) > place[node]:
            user.replace_input_with(source, result)
    graph.erase_node(node)
