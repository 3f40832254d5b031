"""Helpers for all passes: a graph to rewrite, and what happens to memory between two of its operations.

A pass takes a :class:`Trace` and returns a better one. It matches patterns of operations, so it has to know that
nothing comes between them: if a value is now used later, nothing may write to it in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace, has_effects
from manyhands.backends.torch.passes.fusible import like

_aten = torch.ops.aten


@dataclass(frozen=True)
class Pass:
    """One rewrite of a trace, for the list that a step goes through.

    ``apply`` returns the new trace and a short description of what was done, or the same object and None.
    """

    name: str
    to_the_bit: bool  # otherwise results are equal up to the order of sums
    apply: Callable[[Trace], tuple[Trace, str | None]]


class Rewriting:
    """A copy of a trace's graph, and the places and memories of its operations in the original."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.graph, new = trace.copied_graph()
        self._old = {copy: original for original, copy in new.items()}
        self._place = {node: place for place, step in enumerate(trace.steps) for node in step.nodes}

    def nodes(self, *targets: object) -> list[Node]:
        """The operations with one of these targets, in program order."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target in targets]

    def place(self, node: Node) -> int:
        """The operation's position in the program; inputs and constants come before all others."""
        return self._place.get(self._old[node], -1)

    def unchanged(self, nodes: Iterable[object], after: Node, before: Node) -> bool:
        """Whether no operation between these two writes to the memory of the nodes."""
        memories = self._memories(nodes)
        between = self.trace.steps[self.place(after) + 1 : self.place(before)]
        return not any(memories & step.task.writes for step in between)

    def untouched(self, nodes: Iterable[object], after: Node, last: Node) -> bool:
        """Whether no operation after the first, up to and including the second, touches the memory of the nodes."""
        memories = self._memories(nodes)
        between = self.trace.steps[self.place(after) + 1 : self.place(last) + 1]
        return not any(memories & (step.task.writes | step.task.reads) for step in between)

    def _memories(self, nodes: Iterable[object]) -> frozenset[int]:
        known = [self._old[node] for node in nodes if isinstance(node, Node) and node in self._old]
        return frozenset[int]().union(*(self.trace.storages[node] for node in known))

    def takers(self, node: Node) -> set[Node]:
        """The operations that use a node's result, or a view of it."""
        takers: set[Node] = set()
        for user in node.users:
            if user.op != "output":
                takers |= self.takers(user) if self.trace.steps[self.place(user)].task.is_view else {user}
        return takers

    def value(self, node: Node) -> Any:
        """The tensor of a constant, which several nodes may refer to."""
        return self.trace.constant(node) if node.op == "get_attr" else None

    def same(self, first: object, second: object) -> bool:
        """Whether two nodes refer to the same tensor."""
        if first is second:
            return True
        if not isinstance(first, Node) or not isinstance(second, Node):
            return False
        return self.value(first) is not None and self.value(first) is self.value(second)

    def empty(self, form: torch.Tensor, dtype: torch.dtype | None = None) -> Node:
        """An operation that allocates memory of this form."""
        how: Any = {"dtype": dtype or form.dtype, "device": form.device}
        target: Any = _aten.empty_strided.default
        node = self.graph.call_function(target, (list(form.shape), list(form.stride())), how)
        node.meta["val"] = like(form if dtype is None else form.to(dtype))
        return node

    def form(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fake tensor for a result of this form."""
        return like(torch.empty(shape, dtype=dtype, device="meta"), device)

    def node_of_input(self, node: object) -> Node:
        """A node for the same tensor of the caller, for use at the current insertion point."""
        assert isinstance(node, Node)
        if node.op == "placeholder":
            return node
        copy = self.graph.get_attr(str(node.target))
        copy.meta = dict(node.meta)
        return copy

    def call(self, target: Any, arguments: tuple[Any, ...], forms: Any = None, **named: Any) -> Node:
        """An operation whose results have these forms, in new memory."""
        node = self.graph.call_function(target, arguments, named)
        node.meta["val"] = (
            tuple(map(like, forms)) if isinstance(forms, tuple) else None if forms is None else like(forms)
        )
        return node

    def view(self, target: Any, node: Node, *how: Any) -> Node:
        """A view of a node's memory."""
        view = self.graph.call_function(target, (node, *how))
        view.meta["val"] = target(node.meta["val"], *how)
        return view

    def part(self, whole: Node, number: int) -> Node:
        """One of several results of an operation."""
        node = self.graph.call_function(operator.getitem, (whole, number))
        node.meta["val"] = whole.meta["val"][number]
        return node

    def done(self) -> Trace:
        """The rewritten trace, without operations whose results nobody uses any more."""
        self.graph.eliminate_dead_code(is_impure_node=has_effects)
        return self.trace.rewritten(self.graph)


def parts(node: Node) -> dict[int, list[Node]]:
    """The ``getitem`` nodes of an operation, by the result's number."""
    by_number: dict[int, list[Node]] = {}
    for user in node.users:
        if user.target is operator.getitem:
            number: Any = user.args[1]
            by_number.setdefault(number, []).append(user)
    return by_number


def without_detaches(trace: Trace) -> tuple[Trace, str | None]:
    """Replace every ``detach`` by its argument: a trace has no autograd graph to detach from."""
    rewriting = Rewriting(trace)
    detaches = rewriting.nodes(_aten.detach.default)
    for node in detaches:
        node.replace_all_uses_with(node.all_input_nodes[0])
        rewriting.graph.erase_node(node)
    return (rewriting.done(), f"{len(detaches)} removed") if detaches else (trace, None)
