"""Splits operations of a trace that do several independent things.

A convolution's backward is one operation in ATen. It computes the gradient of the input, which the rest of the backward
pass waits for, and those of weight and bias, which nothing waits for: it becomes two operations.

An optimizer's update of all weights is a few operations over lists, each of which waits for all gradients. Cut into
parts of about equal bytes, each part waits only for its own gradients and runs beside the rest of the backward pass:

    _foreach_add_([w, v, u], [dw, dv, du], alpha=-0.1)        _foreach_add_([w, v], [dw, dv], alpha=-0.1)
                                                              _foreach_add_([u], [du], alpha=-0.1)

Gradients come last layer first, so the second of these begins when the backward pass is only at the layer of ``v``.
Every list as long as the first one is cut at the same places, tensors and numbers alike; results of operations that are
not in place are taken from their part. Each part is placed in the program as soon as its inputs are ready: otherwise
schedules that keep program order would run it at the end. Parts that share memory keep their order in the list: a
tensor that occurs twice in a list is updated twice, as in eager mode.

This pays on a GPU (on a CPU such an operation is a loop), if a part is large compared with the start of a kernel and
if parts could begin at different times. For each memory, the pass knows which operations must be done before it can be
used; neighbouring parts with the same such operations stay together. So an update whose tensors all existed from the
start stays whole, and so does everything after gradients were scaled by the norm of all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Step, Trace, has_effects
from manyhands.backends.torch.run.bindings import FUSED_UPDATES

_BACKWARD = torch.ops.aten.convolution_backward.default
# Prefixes of operations over lists; those that end with a dot are in place.
_OVER_LISTS = ("aten._foreach_", *FUSED_UPDATES)
_MOST = 4  # parts of one operation
_LEAST = 4 << 20  # bytes of a part: moving them takes about as long as one more kernel (2 us)

# Places in lists: where a part begins and ends.
Part = tuple[int, int]


def split(trace: Trace, kinds: Sequence[str] = ("cuda",), least: int = _LEAST) -> Trace:
    """The trace with such operations split; the same object if there are none.

    Updates are cut on these kinds of devices, into parts with at least ``least`` bytes of the first list.
    """
    return _split_updates(_split_convolutions(trace), kinds, least)


# Convolutions


def _split_convolutions(trace: Trace) -> Trace:
    """Write two operations for every convolution's backward that returns both input and weight gradients."""
    whole = [step.node for step in trace.steps if _gives_both(step.node)]
    if not whole:
        return trace
    graph, new = trace.copied_graph()
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
    return trace.rewritten(graph)


def _gives_both(node: Node) -> bool:
    mask: Any = node.args[-1] if node.target is _BACKWARD else (False, False)
    return bool(mask[0] and mask[1])


# Updates


def _split_updates(trace: Trace, kinds: Sequence[str], least: int) -> Trace:
    cuts = {step.node: _cuts(step.node, least) for step in trace.steps if _can_be_cut(step, kinds)}
    if not any(len(places) > 1 for places in cuts.values()):
        return trace
    ready, placed, moved = _Ready(trace), dict[int, list[tuple[Node, Part]]](), set[Node]()
    any_cut = False
    for number, step in enumerate(trace.steps):
        parts = ready.parts(step, number, cuts.get(step.node, []))
        for part, place in parts:
            placed.setdefault(place, []).append((step.node, part))
            moved.add(step.node)
        any_cut |= len(parts) > 1
    return trace.rewritten(_in_parts(trace, moved, placed)) if any_cut else trace


def _can_be_cut(step: Step, kinds: Sequence[str]) -> bool:
    """Whether an operation treats every list element alike, and runs the same kernels on parts of the lists."""
    node, lists, first = step.node, _lists(step.node), _first(step.node)
    if not first or not str(node.target).startswith(_OVER_LISTS):
        return False
    if first[0].device.type not in kinds or len({(item.device, item.dtype) for item in first}) > 1:
        return False
    # A tensor argument outside the lists may hold one number per list element.
    beside = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, Node)]
    results = node.meta.get("val") or ()
    if any(item.meta["val"].numel() > 1 for item in beside) or any(
        u.target is not operator.getitem for u in node.users
    ):
        return False
    if [result.shape for result in results] not in ([], [item.shape for item in first]):
        return False  # a norm of each tensor: the order of its sum may depend on the largest in the list
    # PyTorch has one kernel if the tensors at the same position of all lists are alike, and a loop otherwise.
    same_form = [
        all(
            _form(value) == _form(item)
            for tensors in lists
            if isinstance(value := _value(tensors[place]), torch.Tensor)
        )
        for place, item in enumerate(first)
    ]
    return str(node.target).startswith(FUSED_UPDATES) or len(set(same_form)) == 1


def _lists(node: Node) -> list[Sequence[Any]]:
    """The arguments that are cut: lists as long as the first one."""
    lists = [
        argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, (list, tuple)) and argument
    ]
    return [argument for argument in lists if len(argument) == len(lists[0])]


def _first(node: Node) -> list[torch.Tensor]:
    """The tensors of the first list; empty if it is not a list of tensors."""
    values = [_value(item) for item in next(iter(_lists(node)), ())]
    return values if all(isinstance(value, torch.Tensor) for value in values) else []


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride()


def _cuts(node: Node, least: int) -> list[Part]:
    """Parts of the lists of about equal bytes, each with at least ``least`` bytes."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in _first(node)]
    wanted = max(least, -(-sum(sizes) // _MOST))
    cuts: list[Part] = []
    begin = size = 0
    for place, tensor in enumerate(sizes):
        size += tensor
        if size >= wanted:
            cuts.append((begin, place + 1))
            begin, size = place + 1, 0
    if size < least and cuts:  # the rest is too small
        begin = cuts.pop()[0]
    return [*cuts, (begin, len(sizes))] if begin < len(sizes) else cuts


@dataclass(frozen=True)
class _When:
    """The steps that must be done before another can run, as the bits of a number; and the place of the last one."""

    steps: int = 0
    place: int = -1

    def __or__(self, other: _When) -> _When:
        return _When(self.steps | other.steps, max(self.place, other.place))


def _holds_no_memory(node: Node) -> bool:
    """Whether an operation over lists is in place, or its lists hold single numbers."""
    schema = compat.schema(node.target)
    return schema.is_mutable or all(tensor.numel() == 1 for tensor in _first(node))


class _Ready:
    """When each memory can be used, from step to step."""

    def __init__(self, trace: Trace) -> None:
        self._storages = trace.storages
        self._handles = range(len(trace.storages))  # a view writes only to these, not to memory
        self._written: dict[int, _When] = {}
        self._read: dict[int, _When] = {}

    def parts(self, step: Step, number: int, cuts: Sequence[Part]) -> list[tuple[Part, int]]:
        """Advance past a step; returns the parts to cut it into, if any, each with the step that it can follow.

        A single part is the whole operation, moved forward: parts of later operations may wait for it. It is not moved
        if that would only hold memory for longer.
        """
        reads, writes = step.task.reads, step.task.writes
        parts: list[tuple[Part, _When]] = []
        for part in cuts:
            memories = self._memories(step.node, part)
            when = self._when(reads & memories, writes & memories)
            if parts and parts[-1][1].steps == when.steps:  # no reason to cut here
                (begin, _), earlier = parts.pop()
                part, when = (begin, part[1]), earlier | when
            parts.append((part, when))
        if not parts or (len(parts) == 1 and not _holds_no_memory(step.node)):
            when = _When(0 if all(write in self._handles for write in writes) else 1 << number, number)
            self._done(reads, writes, self._when(reads, writes) | when)
            return []
        for part, when in parts:
            memories = self._memories(step.node, part)
            self._done(reads & memories, writes & memories, when | _When(1 << number))
        return [(part, when.place) for part, when in parts]

    def _memories(self, node: Node, part: Part) -> frozenset[int]:
        """The memories that a part touches: its slices of the lists, other arguments, its results."""
        begin, end = part
        values: list[Any] = [*node.args, *node.kwargs.values()]
        values += [tensor for tensors in _lists(node) for tensor in tensors[begin:end]]
        values += [user for user in node.users if begin <= user.args[1] < end]  # type: ignore[operator]
        return frozenset[int]().union(*(self._storages[value] for value in values if isinstance(value, Node)))

    def _when(self, reads: frozenset[int], writes: frozenset[int]) -> _When:
        when = _When()
        for memory in reads | writes:
            when |= self._written.get(memory, when)
        for memory in writes:
            when |= self._read.get(memory, when)
        return when

    def _done(self, reads: frozenset[int], writes: frozenset[int], when: _When) -> None:
        for memory in writes:
            self._written[memory] = when
            self._read.pop(memory, None)
        for memory in reads - writes:
            self._read[memory] = self._read.get(memory, when) | when


def _in_parts(trace: Trace, moved: set[Node], placed: Mapping[int, Sequence[tuple[Node, Part]]]) -> Graph:
    """The graph with these operations in parts, each placed after the step that it can follow."""
    graph, new = Graph(), dict[Node, Node]()
    for node in trace.inputs + trace.constants:
        new[node] = graph.node_copy(node, new.__getitem__)
    for place, step in enumerate([None, *trace.steps], -1):
        for node in step.nodes if step is not None and step.node not in moved else ():
            new[node] = graph.node_copy(node, new.__getitem__)
        for node, part in placed.get(place, ()):
            _write_part(graph, new, node, part)
    graph.output([new[output] if isinstance(output, Node) else output for output in trace.outputs])
    return graph


def _write_part(graph: Graph, new: dict[Node, Node], node: Node, part: Part) -> None:
    """Write the operation for a part of its lists, and take its results from there."""
    begin, end = part
    length = len(_lists(node)[0])

    def piece(value: Any) -> Any:
        return value[begin:end] if isinstance(value, (list, tuple)) and len(value) == length else value

    target: Any = node.target
    arguments = map_arg(tuple(map(piece, node.args)), new.__getitem__)
    named = map_arg({name: piece(value) for name, value in node.kwargs.items()}, new.__getitem__)
    call = graph.call_function(target, arguments, named)
    call.meta = {**node.meta, "val": piece(node.meta.get("val"))}
    for user in node.users:
        place: Any = user.args[1]
        if begin <= place < end:
            new[user] = graph.call_function(operator.getitem, (call, place - begin))
            new[user].meta = dict(user.meta)
