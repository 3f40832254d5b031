"""Moves biases out of convolutions in a trace: an addition after each, and a sum over the gradient in the backward.

On a GPU a convolution's bias is not part of its kernel: another kernel goes over the whole result to add it, and the
backward pass goes over the whole gradient once more to sum it. In a trace both are hidden inside the convolution, which
is not compiled. As separate operations they are small, and cost almost nothing in the kernels that read and write
these tensors anyway:

    y = convolution(x, w, bias)                       y = convolution(x, w, None)
    z = batch_norm(y)                                 z = batch_norm(y + bias)
    ...                                               ...
    g = batch_norm_backward(dz, y)                    g = batch_norm_backward(dz, y + bias)
    dw, dbias = convolution_backward(g, x, w)         dw = convolution_backward(g, x, w);  dbias = g.sum((0, 2, 3))

The addition is written twice, once for each of its two users: each recomputes it from values that are in memory anyway.
With one addition for both, its result would have to be stored for the backward pass, besides the convolution's result.
If it must be in memory (for operations that are not compiled, for results, for views), it is stored once for all.

On a CPU the bias stays in the convolution: oneDNN's kernels add it at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes.fusible import is_small, is_view, like, written_in_place

_aten = torch.ops.aten


def take_out_biases(trace: Trace, kinds: Sequence[str] = ("cuda",)) -> Trace:
    """The trace with biases outside convolutions on these kinds of devices; the same object if there are none."""
    forward = [step.node for step in trace.steps if _adds_bias(step.node) and _kind(step.node) in kinds]
    backward = [step.node for step in trace.steps if _sums_bias(step.node) and _kind(step.node) in kinds]
    if not forward and not backward:
        return trace
    written = written_in_place(trace)
    computing = {step.node for step in trace.steps if is_small(step, written) and not is_view(step)}
    graph, new = trace.copied_graph()
    for node in forward:
        # A user that writes to the result in place, directly or through a view, needs one addition for all users.
        _add_after(graph, new[node], for_each_user=computing.issuperset(node.users))
    for node in backward:
        _sum_beside(graph, new[node])
    return trace.rewritten(graph)


def _adds_bias(node: Node) -> bool:
    return node.target is _aten.convolution.default and node.args[2] is not None


def _sums_bias(node: Node) -> bool:
    return node.target is _aten.convolution_backward.default and bool(node.args[-1][2])  # type: ignore[index]


def _kind(node: Node) -> str:
    """The type of device that a convolution, or its backward pass, runs on."""
    first: Any = node.args[0]
    return str(first.meta["val"].device.type)


def _add_after(graph: Graph, node: Node, *, for_each_user: bool) -> None:
    """Write the convolution without its bias, and one addition for all users or one for each."""
    arguments: Any = node.args
    x, weight, bias, *others = arguments
    result, bias_value = node.meta["val"], bias.meta["val"]
    shape = [1, bias_value.numel(), *[1] * (result.dim() - 2)]
    if not _keeps_form(result, shape):
        return

    def added(value: torch.Tensor) -> Node:
        across = graph.call_function(_aten.view.default, (bias, shape))
        # A constant counts as a memory of its own; two views of the real tensor would seem to write to one memory.
        across.meta["val"] = (like(bias_value) if bias.op == "get_attr" else bias_value).view(shape)
        total = graph.call_function(_aten.add.Tensor, (bare, across))
        total.meta["val"] = value
        return total

    with graph.inserting_before(node):
        bare = graph.call_function(_aten.convolution.default, (x, weight, None, *others))
        bare.meta["val"] = like(result)
        for user in list(node.users) if for_each_user else ():
            user.replace_input_with(node, added(like(result)))
        if not for_each_user:
            node.replace_all_uses_with(added(result))  # its views are views of this memory
    graph.erase_node(node)


def _keeps_form(result: torch.Tensor, bias: Sequence[int]) -> bool:
    """Whether adding a bias of this shape keeps the strides of the convolution's result."""
    form = torch.empty_strided(result.shape, result.stride(), device="meta")
    return (form + torch.empty(bias, device="meta")).stride() == result.stride()


def _sum_beside(graph: Graph, node: Node) -> None:
    """Compute the gradient of the bias as a sum, outside the operation for the other gradients."""
    *arguments, mask = node.args
    gradient: Any = arguments[0]
    whole = node.meta["val"]
    across = [0, *range(2, gradient.meta["val"].dim())]
    options = {} if gradient.meta["val"].dtype is whole[2].dtype else {"dtype": whole[2].dtype}
    with graph.inserting_before(node):
        total = graph.call_function(_aten.sum.dim_IntList, (gradient, across), options)
    total.meta["val"] = whole[2]
    for part in list(node.users):
        if part.args[1] == 2:
            part.replace_all_uses_with(total)
            graph.erase_node(part)
    node.args = (*arguments, [mask[0], mask[1], False])  # type: ignore[index]
    node.meta["val"] = (whole[0], whole[1], None)
    if not node.users:
        graph.erase_node(node)
