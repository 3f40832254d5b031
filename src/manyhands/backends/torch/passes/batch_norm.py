"""Splits batch normalisation in a trace into a pure operation and copies into its running statistics.

PyTorch's operations update the running statistics as a side effect, which a compiler of pure regions cannot handle; and
cuDNN's keep data for their own backward pass. Both are replaced by PyTorch's pure operations, whose results are the
same. The backward pass of training takes the running statistics as arguments but does not use them: the arguments are
removed, or it would wait for those copies.

Each layer then has three tiny operations that nothing waits for: two copies, and an increment of
``num_batches_tracked``. On a GPU each takes as long as its kernel takes to start. Those of all layers are batched where
nothing touches the same memory after them: one operation for the statistics, one for the counts.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes.fusible import like
from manyhands.backends.torch.passes.small_together import count_together
from manyhands.errors import CannotFuse

_aten = torch.ops.aten
_FORWARD = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten._native_batch_norm_legit.default)


def make_pure(trace: Trace) -> Trace:
    """The trace with pure batch normalisations; the same object if there are none."""
    if not any(node.target in _FORWARD for node in trace.module.graph.nodes):
        return trace
    graph, _ = trace.copied_graph()
    old = [node for node in graph.nodes if node.target in _FORWARD]
    for node in list(graph.nodes):
        if node.target is _aten.cudnn_batch_norm_backward.default:
            _make_backward_plain(graph, node)
        elif node.target is _aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    copies = [copy for node in old for copy in _make_forward_pure(graph, node)]
    pure = trace.rewritten(graph)
    return count_together(trace.rewritten(graph) if _copy_together(pure, copies) else pure)


def _make_forward_pure(graph: Graph, node: Node) -> list[Node]:
    """Returns the copies into its running statistics."""
    arguments: Any = node.args
    x, weight, bias, mean, variance, training, momentum, epsilon = arguments[:8]
    whole = node.meta["val"]
    copies: list[Node] = []
    with graph.inserting_before(node):
        if mean is None:
            target: Any = _aten._native_batch_norm_legit.no_stats
            pure = graph.call_function(target, (x, weight, bias, training, momentum, epsilon))
        elif not training:
            target = _aten._native_batch_norm_legit_no_training.default
            pure = graph.call_function(target, (x, weight, bias, mean, variance, momentum, epsilon))
        else:
            target = _aten._native_batch_norm_legit_functional.default
            pure = graph.call_function(target, (x, weight, bias, mean, variance, training, momentum, epsilon))
        pure.meta["val"] = tuple(whole[:3])
        if mean is not None and training:
            fresh = [like(statistic_node.meta["val"]) for statistic_node in (mean, variance)]
            pure.meta["val"] += tuple(fresh)
            for number, statistic in enumerate((mean, variance)):
                part = graph.call_function(operator.getitem, (pure, 3 + number))
                part.meta["val"] = fresh[number]
                copies.append(graph.call_function(_aten.copy_.default, (statistic, part)))
                copies[-1].meta["val"] = statistic.meta["val"]
    for part in list(node.users):
        if part.args[1] == 3 and not part.users:  # what cuDNN keeps for its backward pass
            graph.erase_node(part)
    if any(part.args[1] == 3 for part in node.users):
        raise CannotFuse("what cuDNN's batch normalisation keeps for its backward pass has another user")
    node.replace_all_uses_with(pure)
    graph.erase_node(node)
    return copies


def _make_backward_plain(graph: Graph, node: Node) -> None:
    """Replace cuDNN's backward by PyTorch's: apart from the reserve space, both use the same saved values."""
    arguments: Any = node.args
    x, gradient, weight, _, _, saved_mean, saved_rstd, epsilon = arguments[:8]
    plain_arguments = (gradient, x, weight, None, None, saved_mean, saved_rstd, True, epsilon, [True, True, True])
    with graph.inserting_before(node):
        plain = graph.call_function(_aten.native_batch_norm_backward.default, plain_arguments)
    plain.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(plain)
    graph.erase_node(node)


# Statistics of all layers together


def _copy_together(trace: Trace, copies: Sequence[Node]) -> bool:
    """Batch these copies into one operation per device and dtype; False if there are none."""
    kinds: dict[Any, list[Node]] = {}
    touched: set[int] = set()  # by later steps
    for step in reversed(trace.steps):
        node = step.node
        if node in copies and not step.task.writes & touched:
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            kinds.setdefault((value.device, value.dtype), []).append(node)
        touched |= step.task.reads | step.task.writes
    groups = [nodes[::-1] for nodes in kinds.values() if len(nodes) > 1]
    for nodes in groups:
        graph = nodes[0].graph
        targets, sources = ([node.args[place] for node in nodes] for place in (0, 1))
        with graph.inserting_after(nodes[-1]):
            together = graph.call_function(_aten._foreach_copy_.default, (targets, sources))
        together.meta["val"] = None
        for node in nodes:
            graph.erase_node(node)
    return bool(groups)
