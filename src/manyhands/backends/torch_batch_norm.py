"""Takes batch normalisation apart in a trace: a pure operation, and copies into its running statistics.

PyTorch's operations for it write to the running statistics in passing, which a compiler of pure regions cannot have;
and cuDNN's keep a note for their own backward pass. Both become PyTorch's pure ones, whose results are the same.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from manyhands.backends.torch_trace import Trace
from manyhands.errors import CannotFuse

_aten = torch.ops.aten
_FORWARD = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten._native_batch_norm_legit.default)


def make_pure(found: Trace) -> Trace:
    """The same trace with pure batch normalisations; the very same where there are none."""
    if not any(node.target in _FORWARD for node in found.module.graph.nodes):
        return found
    graph = found.copied_graph()
    old = [node for node in graph.nodes if node.target in _FORWARD]
    for node in list(graph.nodes):
        if node.target is _aten.cudnn_batch_norm_backward.default:
            _make_backward_plain(graph, node)
    for node in old:
        _make_forward_pure(graph, node)
    return found.rewritten(graph)


def _make_forward_pure(graph: Graph, node: Node) -> None:
    arguments: Any = node.args
    x, weight, bias, mean, variance, training, momentum, epsilon = arguments[:8]
    whole = node.meta["val"]
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
            fresh = [_like(one) for one in (mean, variance)]
            pure.meta["val"] += tuple(fresh)
            for number, statistic in enumerate((mean, variance)):
                part = graph.call_function(operator.getitem, (pure, 3 + number))
                part.meta["val"] = fresh[number]
                copied = graph.call_function(_aten.copy_.default, (statistic, part))
                copied.meta["val"] = statistic.meta["val"]
    for part in list(node.users):
        if part.args[1] == 3 and not part.users:  # cuDNN's note
            graph.erase_node(part)
    if any(part.args[1] == 3 for part in node.users):
        raise CannotFuse("cuDNN's note of a batch normalisation is taken by somebody else")
    node.replace_all_uses_with(pure)
    graph.erase_node(node)


def _like(node: Node) -> torch.Tensor:
    value = node.meta["val"]
    with FakeTensorMode():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _make_backward_plain(graph: Graph, node: Node) -> None:
    """cuDNN's backward without its note: what it saved is what PyTorch's own saves."""
    arguments: Any = node.args
    x, gradient, weight, mean, variance, saved_mean, saved_deviation, epsilon = arguments[:8]
    given = (gradient, x, weight, mean, variance, saved_mean, saved_deviation, True, epsilon, [True, True, True])
    with graph.inserting_before(node):
        plain = graph.call_function(_aten.native_batch_norm_backward.default, given)
    plain.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(plain)
    graph.erase_node(node)
