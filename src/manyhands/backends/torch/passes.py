"""Rewrites of a trace: gradients of convolutions are split for lanes, or a compiler makes one task of everything.

A convolution's backward is one operation in ATen. It computes the gradient of the input, which the rest of the backward
pass waits for, and those of weight and bias, which nothing waits for: it becomes two operations.

Compiling a whole trace leaves nothing for lanes, but the compiler sees all of it: it fuses small operations, and
chooses layouts. Whether that is faster than lanes of PyTorch's own kernels is measured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from manyhands.addresses import AddressRange, join
from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace, has_effects, is_check
from manyhands.backends.torch.compat import FakeTensorMode
from manyhands.errors import CannotFuse

_LEAST = 2  # operations that compute something
# How far results may be from those of the uncompiled graph: compiled code rounds in other places. Wrong results differ
# by about one.
_CLOSE, _CLOSE_IN_LOW_PRECISION = 5e-3, 5e-2
_LOW = (torch.bfloat16, torch.float16)

_aten = torch.ops.aten

_BACKWARD = _aten.convolution_backward.default

# Compiles a graph to a function, given tensors like its inputs.
Compiler = Callable[[GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


def split_convolutions(trace: Trace) -> Trace:
    """Two operations for every convolution's backward that returns both input and weight gradients."""
    whole = [step.node for step in trace.steps if _gives_both(step.node)]
    if not whole:
        return trace
    graph, new = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(trace.module.graph, new))
    for node in map(new.__getitem__, whole):
        all_arguments: Any = node.args
        *arguments, mask = all_arguments
        with graph.inserting_before(node):
            for_input = graph.call_function(_BACKWARD, (*arguments, [True, False, False]))
            for_weight = graph.call_function(_BACKWARD, (*arguments, [False, True, mask[2]]))
        result = node.meta["val"]
        for_input.meta["val"] = (result[0], None, None)
        for_weight.meta["val"] = (None, result[1], result[2])
        for user in list(node.users):
            user.replace_input_with(node, for_input if user.args[1] == 0 else for_weight)
        graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=has_effects)  # the input's gradient may be unused
    split = trace.with_graph(graph)
    split.unsplit = trace
    return split


def _gives_both(node: Node) -> bool:
    mask: Any = node.args[-1] if node.target is _BACKWARD else (False, False)
    return bool(mask[0] and mask[1])


class Compiled:
    """A compiled graph, called like an operation."""

    def __init__(self, words: str, compiled: Callable[..., Any]) -> None:
        self.words = words
        self.__name__ = "compiled"
        self._compile = compiled

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self._compile(*tensors)

    def __str__(self) -> str:
        return self.words


def compile_whole(trace: Trace, compiler: Compiler | None = None) -> Trace:
    """The same graph compiled as one task; :class:`CannotFuse` says why it cannot be compiled.

    The compiled code also makes the writes of the graph, such as those to running averages.
    """
    trace = trace.unsplit or trace
    _must_be_compilable(trace)
    sources = [*trace.inputs, *trace.constants]
    results = [
        node
        for node in dict.fromkeys(trace.outputs)
        if isinstance(node, Node) and node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    whole = _compile(trace, sources, results, compiler or inductor)
    graph, new = Graph(), dict[Node, Node]()
    for node in sources:
        new[node] = graph.node_copy(node)
    call = graph.call_function(whole, tuple(new[node] for node in sources))
    call.meta["val"] = tuple(node.meta["val"] for node in results)
    for number, node in enumerate(results):
        new[node] = graph.call_function(operator.getitem, (call, number))
        new[node].meta["val"] = node.meta["val"]
    graph.output([new[output] if isinstance(output, Node) else output for output in trace.outputs])
    compiled = trace.with_graph(graph)
    values = [node.meta.get("val") for node in trace.storages]
    low = any(isinstance(value, torch.Tensor) and value.dtype in _LOW for value in values)
    compiled.close = _CLOSE_IN_LOW_PRECISION if low else _CLOSE
    written = trace.written_memories() & compiled.callers_memories()
    for step in compiled.steps:  # the only one: its schema does not say what it writes to
        step.task = replace(step.task, writes=step.task.writes | written)
    return compiled


def _must_be_compilable(trace: Trace) -> None:
    """Refuse traces that cannot be one compiled task: on several devices, with random numbers or checks of values."""
    if compat.count_dispatch_modes():
        raise CannotFuse("a dispatch mode is active (virtual devices?): PyTorch compiles nothing while one is")
    if len({step.task.device for step in trace.steps}) > 1 or any(step.task.kind != "compute" for step in trace.steps):
        raise CannotFuse("nothing is compiled: it runs on several devices")
    if any(step.task.token is not None for step in trace.steps):
        raise CannotFuse("nothing is compiled: compiled code would draw different random numbers")
    if any(is_check(step.node) for step in trace.steps):
        raise CannotFuse("nothing is compiled: it checks values on the way")
    if sum(not step.task.is_view for step in trace.steps) < _LEAST:
        raise CannotFuse("nothing is compiled: it is a single operation")
    if _writes_shared_memory(trace):
        raise CannotFuse("nothing is compiled: it writes to memory that two of its tensors share")


def _writes_shared_memory(trace: Trace) -> bool:
    """Whether tensors from outside overlap where the trace writes: compiled code takes each for memory of its own.

    Tensors may lie in one storage side by side, as the weights of an LSTM on a GPU do.
    """
    written, spans = trace.written_memories(), dict[int, list[AddressRange]]()
    for node in [*trace.inputs, *trace.constants]:
        tensor = trace.constant(node) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            offset = int(tensor.storage_offset()) * tensor.element_size()
            start = tensor.data_ptr() if node.op == "get_attr" else offset
            span = AddressRange(start, start + compat.reach(tensor) * tensor.element_size())
            for memory in trace.storages[node] & written:
                spans.setdefault(memory, []).append(span)
    return any(len(join(beside)) < len(beside) for beside in spans.values())


def _compile(trace: Trace, sources: Sequence[Node], results: Sequence[Node], compiler: Compiler) -> Compiled:
    graph, new = Graph(), dict[Node, Node]()
    for number, node in enumerate(sources):
        new[node] = graph.placeholder(f"input_{number}")
    for node in (node for step in trace.steps for node in step.nodes):
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in results))
    module, metas = GraphModule({}, graph), [node.meta["val"] for node in sources]
    function = _in_form(compiler(module, metas), [node.meta["val"] for node in results])
    return Compiled(f"compiled {count_of(len(trace.steps), 'operation')}", function)


def _in_form(compiled: Callable[..., Any], metas: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return results with the strides of the graph: a caller may look at them."""
    forms = [(tuple(meta.shape), meta.stride()) for meta in metas]

    def run(*inputs: torch.Tensor) -> Any:
        return [
            result if result.stride() == stride else result.new_empty_strided(shape, stride).copy_(result)
            for result, (shape, stride) in zip(compiled(*inputs), forms, strict=True)
        ]

    return run


def inductor(module: GraphModule, metas: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Inductor's code for a graph without gradients.

    The caller's autocast does not count: casts are operations of the graph.
    """
    with FakeTensorMode():
        inputs = [*map(compat.empty_as, metas)]
    try:
        # Lanes divide the threads: how many there are is known when the code runs, not when it is compiled. And folding
        # turns x + 0 into x itself: an argument would be returned as if it were a new result.
        how = {"cpp.dynamic_threads": True, "joint_graph_constant_folding": False}
        with torch.no_grad(), compat.no_autocast():
            return compat.inductor_compile(module, inputs, how)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CannotFuse(f"{type(error).__name__}: {text[0] if text else 'no reason given'}") from error
