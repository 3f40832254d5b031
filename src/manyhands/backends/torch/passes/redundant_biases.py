"""Leaves out biases that a BatchNorm cancels.

A BatchNorm in training subtracts the mean of the batch, and with it any constant that was added to all samples. With
x = (1, 3) and a bias of 10::

    x          mean  2    x - mean         = (-1, 1)
    x + 10     mean 12    x + 10 - mean    = (-1, 1)      the same; only the running mean moves by momentum * 10 more

So the gradient of such a bias is zero (a backward pass computes only rounding errors), and adding the bias and summing
its gradient are two useless passes over the layer's output: a fifth of a step of ResNet-18. This pass removes the bias
from the layer, adds its share to the running mean, and gives the bias a gradient of zeros, so that weight decay,
momentum and checkpoints do not change:

    y = convolution(x, w, b)                        y = convolution(x, w, None)
    z = native_batch_norm(y, ..., running_mean)     z = native_batch_norm(y, ..., running_mean)
                                                    running_mean += momentum * b
    dw, db = convolution_backward(...)              dw = convolution_backward(...);  db = zeros

A linear layer, ``addmm(b, x, w)``, becomes ``mm(x, w)``; the gradient of its bias is a ``sum``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes.rewriting import Rewriting, parts

_aten = torch.ops.aten
_BACKWARD = _aten.convolution_backward.default
_LINEAR = _aten.addmm.default
_LAYERS: dict[Any, int] = {_aten.convolution.default: 2, _LINEAR: 0}  # the position of each layer's bias argument


@dataclass
class _Redundant:
    """A layer, the normalisation after it, and the nodes that are gradients of its bias."""

    layer: Node
    norm: Node
    backward: list[Node]  # operations that compute such a gradient and others
    gradients: list[Node]

    @property
    def bias(self) -> Any:
        return self.layer.args[_LAYERS[self.layer.target]]


def leave_out_biases(trace: Trace) -> tuple[Trace, str | None]:
    """Remove every bias that a normalisation cancels."""
    rewriting = Rewriting(trace)
    redundant = [match for node in rewriting.nodes(*_LAYERS) if (match := _matched(rewriting, node)) is not None]
    redundant = [match for match in redundant if _can_shift(rewriting, match)]
    if not redundant:
        return trace, None
    _shift_running_means(rewriting, redundant)
    _write_zeros(rewriting, redundant)
    for match in redundant:
        _without_bias(match.layer)
        for node in match.backward:
            mask: Any = node.args[-1]
            node.args = (*node.args[:-1], [mask[0], mask[1], False])
            node.meta["val"] = (*node.meta["val"][:2], None)
    return rewriting.done(), f"{len(redundant)} left out"


def _without_bias(layer: Node) -> None:
    arguments: Any = layer.args
    if layer.target is _LINEAR:
        layer.target, layer.args = _aten.mm.default, arguments[1:]
    else:
        layer.args = (*arguments[:2], None, *arguments[3:])


def _matched(rewriting: Rewriting, layer: Node) -> _Redundant | None:
    """The layer with its normalisation, if nothing else uses the layer's result, forward and backward."""
    if layer.args[_LAYERS[layer.target]] is None or layer.kwargs:
        return None
    norm, backward = None, []
    for user in layer.users:
        if user.target is _aten.native_batch_norm.default and user.args[0] is layer and norm is None:
            norm = user
        elif user.target is _aten.native_batch_norm_backward.default and user.args[1] is layer:
            backward.append(user)
        else:
            return None
    if norm is None or not norm.args[5] or any(not user.args[7] or user.args[0] is layer for user in backward):
        return None
    users = [user for node in backward for part in parts(node).get(0, ()) for user in part.users]
    if layer.target is _LINEAR:
        sums = [user for user in users if user.target is _aten.sum.dim_IntList and user.args[1] == [0]]
        return _Redundant(layer, norm, [], sums)
    computing = [user for user in users if user.target is _BACKWARD and _is_of(rewriting, user, layer)]
    return _Redundant(layer, norm, computing, [part for node in computing for part in parts(node).get(2, ())])


def _is_of(rewriting: Rewriting, backward: Node, layer: Node) -> bool:
    """Whether ``backward`` computes the gradient of this convolution's bias."""
    mask: Any = backward.args[-1]
    return bool(mask[2]) and all(map(rewriting.same, backward.args[1:3], layer.args[:2]))


def _can_shift(rewriting: Rewriting, match: _Redundant) -> bool:
    """Whether the bias can be added to the running mean."""
    bias, mean = _parameter(match.bias), match.norm.args[3]
    if mean is None:
        return True
    values = [node.meta["val"] for node in (bias, mean) if isinstance(node, Node)]
    if len(values) < 2 or values[0].shape != values[1].shape or values[0].device != values[1].device:
        return False
    return rewriting.unchanged([bias], match.layer, match.norm)


def _parameter(bias: Any) -> Any:
    """The bias before autocast's cast: the running mean is kept in full precision."""
    if bias.target is _aten._to_copy.default and set(bias.kwargs) == {"dtype"} and bias.args[0].op == "get_attr":
        return bias.args[0]
    return bias


def _shift_running_means(rewriting: Rewriting, redundant: list[_Redundant]) -> None:
    """Add each bias's share to its running mean: all after the last normalisation, if nothing reads them earlier."""
    together: dict[Any, list[_Redundant]] = {}
    last = max((match.norm for match in redundant), key=rewriting.place)
    for match in redundant:
        mean: Any = match.norm.args[3]
        if mean is None:
            continue
        value, bias = mean.meta["val"], _parameter(match.bias)
        quiet = rewriting.untouched([mean], match.norm, last) and rewriting.unchanged([bias], match.norm, last)
        key = (value.dtype, bias.meta["val"].dtype, match.norm.args[6]) if quiet or match.norm is last else match
        together.setdefault(key if not isinstance(key, _Redundant) else id(match), []).append(match)
    for group in together.values():
        after = last if len(group) > 1 else group[0].norm
        with rewriting.graph.inserting_after(after):
            means = [match.norm.args[3] for match in group]
            biases = [_parameter(match.bias) for match in group]
            rewriting.call(_aten._foreach_add_.List, (means, biases), alpha=group[0].norm.args[6])


def _write_zeros(rewriting: Rewriting, redundant: list[_Redundant]) -> None:
    """Write the gradients of these biases: parts of one tensor of zeros, allocated in each step."""
    wanted: list[Node] = []
    for match in redundant:
        for gradient in match.gradients:
            users = list(gradient.users)
            casts = [user for user in users if user.target is _aten._to_copy.default]
            wanted += casts if users and casts == users else [gradient]
    groups: dict[Any, list[Node]] = {}
    for node in wanted:
        value = node.meta["val"]
        groups.setdefault((value.dtype, value.device), []).append(node)
    for (dtype, device), nodes in groups.items():
        total = sum(node.meta["val"].numel() for node in nodes)
        with rewriting.graph.inserting_before(min(nodes, key=rewriting.place)):
            target: Any = _aten.zeros.default
            zeros = rewriting.graph.call_function(target, ([total],), {"dtype": dtype, "device": device})
            zeros.meta["val"] = rewriting.form((total,), dtype, device)
        begin = 0
        for node in nodes:
            value = node.meta["val"]
            with rewriting.graph.inserting_before(node):
                piece = rewriting.view(_aten.slice.Tensor, zeros, 0, begin, begin + value.numel())
                if value.dim() != 1:
                    piece = rewriting.view(_aten.view.default, piece, list(value.shape))
            node.replace_all_uses_with(piece)
            rewriting.graph.erase_node(node)
            begin += value.numel()
