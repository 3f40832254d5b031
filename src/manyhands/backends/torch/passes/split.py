"""Splits operations of a trace that do several things which need not wait for each other.

A convolution's backward is one operation in ATen. It computes the gradient of the input, which the rest of the backward
pass waits for, and those of weight and bias, which nothing waits for: it becomes two operations.

An optimizer's update of all weights is a few operations over lists, each of which waits for all gradients. Cut into
parts of about equal bytes, each part waits for its own, and runs beside the rest of the backward pass:

    _foreach_add_([w, v, u], [dw, dv, du], alpha=-0.1)        _foreach_add_([w, v], [dw, dv], alpha=-0.1)
                                                              _foreach_add_([u], [du], alpha=-0.1)

Gradients come last layer first, so the second of these begins when the backward pass is only at the layer of ``v``.
Every list as long as the first one is cut at the same places, tensors and numbers alike; results of operations that are
not in place are found in their part. Each part comes in the program where all that it needs has been done: schedules
that keep the program's order would find it at the end otherwise. Of parts that share memory the one that is earlier in
the list stays the earlier one: a tensor twice in a list is updated twice, as eager does it.

Where it pays: on a GPU (on a CPU such an operation is a loop), where a part is large compared with the start of a
kernel, and where parts could begin at different times. For each memory it is known which operations must be done before
it can be used; neighbouring parts with the same such operations stay together. So an update whose tensors all existed
from the start stays whole, and so does everything after gradients were scaled by the norm of all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from manyhands.backends.torch.capture.trace import Step, Trace, has_effects
from manyhands.backends.torch.run.bindings import FUSED_UPDATES

_BACKWARD = torch.ops.aten.convolution_backward.default
# What an operation's name begins with: those with a point after it are in place.
_OVER_LISTS = ("aten._foreach_", *FUSED_UPDATES)
_MOST = 4  # parts of one operation
_LEAST = 4 << 20  # bytes of a part: moving them takes about as long as the two microseconds of a kernel more

# Places in lists: where a part begins and ends.
Part = tuple[int, int]


def split(trace: Trace, kinds: Sequence[str] = ("cuda",), least: int = _LEAST) -> Trace:
    """The same function with such operations taken apart; the very same where there are none.

    Updates are cut on these kinds of devices, into parts of at least so many bytes of the first list.
    """
    return _split_updates(_split_convolutions(trace), kinds, least)


# Convolutions


def _split_convolutions(trace: Trace) -> Trace:
    """Two operations for every convolution's backward that gives both input and weight gradients."""
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
    graph.eliminate_dead_code(is_impure_node=has_effects)  # nobody may take the input's gradient
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
    """Whether it does the same to every place of its lists, and on parts of them by the same kernels."""
    node, lists, first = step.node, _lists(step.node), _first(step.node)
    if not first or not str(node.target).startswith(_OVER_LISTS):
        return False
    if first[0].device.type not in kinds or len({(item.device, item.dtype) for item in first}) > 1:
        return False
    # A tensor beside the lists may hold a number for each place.
    beside = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, Node)]
    results = node.meta.get("val") or ()
    if any(item.meta["val"].numel() > 1 for item in beside) or any(
        u.target is not operator.getitem for u in node.users
    ):
        return False
    if [result.shape for result in results] not in ([], [item.shape for item in first]):
        return False  # a norm of each tensor: how it is summed up may depend on the largest of the list
    # PyTorch has one kernel for a list of tensors that are all alike at their place, and a loop otherwise.
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
    """The tensors of the first list, or nothing where it is no list of tensors."""
    values = [_value(item) for item in next(iter(_lists(node)), ())]
    return values if all(isinstance(value, torch.Tensor) for value in values) else []


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.stride()


def _cuts(node: Node, least: int) -> list[Part]:
    """Parts of the lists of about equal bytes, none of them smaller than the least."""
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
    """What must be over before something can be done: steps, as the bits of a number; and the place of the last one."""

    steps: int = 0
    place: int = -1

    def __or__(self, other: _When) -> _When:
        return _When(self.steps | other.steps, max(self.place, other.place))


def _holds_no_memory(node: Node) -> bool:
    """Whether an operation over lists is in place, or gives a number for each of them."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return schema.is_mutable or all(tensor.numel() == 1 for tensor in _first(node))


class _Ready:
    """When each memory can be used, from step to step."""

    def __init__(self, trace: Trace) -> None:
        self._storages = trace.storages
        self._handles = range(len(trace.storages))  # a view writes to no memory, only to these
        self._written: dict[int, _When] = {}
        self._read: dict[int, _When] = {}

    def parts(self, step: Step, number: int, cuts: Sequence[Part]) -> list[tuple[Part, int]]:
        """Go on behind a step. The parts that it is to be cut into, if any, each with the step that it can follow.

        One part is the whole: what parts of later operations wait for must not stand at the end of the program. It
        stays there where it would only hold memory for longer.
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
        """That a part touches: its pieces of lists, what is given beside lists, its results."""
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
    """The graph with these operations in parts, each behind the step that it can follow."""
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
    """The operation on a part of its lists, and its results taken from there."""
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
