"""Helpers for all passes: a graph to rewrite, and what happens to memory between two of its operations.

A pass takes a :class:`Trace` and returns a better one. It matches patterns of operations, so it has to know that
nothing comes between them: if a value is now used later, nothing may write to it in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace, has_effects
from manyhands.backends.torch.passes.fusible import like

_aten = torch.ops.aten


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

    def empty(self, form: torch.Tensor) -> Node:
        """An operation that allocates memory of this form."""
        how: Any = {"dtype": form.dtype, "device": form.device}
        target: Any = _aten.empty_strided.default
        node = self.graph.call_function(target, (list(form.shape), list(form.stride())), how)
        node.meta["val"] = like(form)
        return node

    def node_of_input(self, node: object) -> Node:
        """A node for the same tensor of the caller, for use at the current insertion point."""
        assert isinstance(node, Node)
        if node.op == "placeholder":
            return node
        copy = self.graph.get_attr(str(node.target))
        copy.meta = dict(node.meta)
        return copy

    def call_in_place(self, target: Any, arguments: tuple[Any, ...]) -> None:
        """An operation that writes to its arguments, and has no result of its own."""
        self.graph.call_function(target, arguments).meta["val"] = None

    def done(self) -> Trace:
        """The rewritten trace, without operations whose results nobody uses any more."""
        self.graph.eliminate_dead_code(is_impure_node=has_effects)
        return self.trace.rewritten(self.graph)
