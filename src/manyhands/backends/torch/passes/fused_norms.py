"""BatchNorm in training, fused with the addition and the ReLU that follow it, forward and backward.

Our own kernels (:mod:`manyhands.backends.torch.kernels.batch_norm`) are one forward and two backward:

    y = native_batch_norm(x, ...)            mean, rstd, r = empty
    z = add(y, shortcut)
    r = relu(z)                              batch_norm_forward_(r, mean, rstd, x, ..., shortcut, relu=True)
    ...                                      ...
    g = add(g1, g2)                          kept = empty
    t = threshold_backward(g, r, 0)          dx, dw, db = batch_norm_backward(g1, g2, x, mean, ..., r, True, kept)
    dx, dw, db = native_batch_norm_backward(t, x, ...)      (kept is t, if something else uses it: the shortcut)

If something uses the statistics before the ReLU, a separate operation computes them.
Without an addition the ReLU's mask is recomputed from ``x``, so the backward pass does not read ``r``. Results are
equal up to the order in which the statistics are summed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.kernels import batch_norm as kernels
from manyhands.backends.torch.passes.rewriting import Rewriting, parts

_aten = torch.ops.aten
_RELU = (_aten.relu.default, _aten.relu_.default)
_ADD = (_aten.add.Tensor, _aten.add_.Tensor)


@dataclass
class _Norm:
    """A normalisation: its operation, the addition, and the ReLU that follows."""

    node: Node
    y: Node | None  # its result, if something uses it
    addition: Node | None = None
    relu: Node | None = None
    mean: Node | None = None  # of our own statistics
    rstd: Node | None = None
    whole: bool = False  # statistics and result in one operation, at the place of the last

    @property
    def last(self) -> Node:
        """The last fused operation, whose result our kernel writes."""
        return self.relu or self.addition or self.y or self.node

    @property
    def added(self) -> Any:
        """The other operand of the addition; a property, because it may have been rewritten in the meantime."""
        if self.addition is None:
            return None
        first, second = self.addition.args[:2]
        return second if first is self.y else first

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        """Input, weight and bias."""
        arguments: Any = self.node.args
        return arguments[0], arguments[1], arguments[2]


def fuse_norms(trace: Trace) -> tuple[Trace, str | None]:
    """Use our own kernels for every normalisation that they fit."""
    rewriting = Rewriting(trace)
    norms: list[_Norm] = []
    for node in rewriting.nodes(_aten.native_batch_norm.default):
        if _fits(node):
            norms.append(_matched(rewriting, node, {norm.addition for norm in norms}))
            norms[-1].whole = _is_whole(rewriting, norms[-1])
    if not norms:
        return trace, None
    done = Counter[str]()
    by_mean = {part: norm for norm in norms for part in parts(norm.node).get(1, ())}
    backward = [
        (node, by_mean[node.args[5]])  # type: ignore[index]
        for node in rewriting.nodes(_aten.native_batch_norm_backward.default)
        if node.args[5] in by_mean and _fits_backward(rewriting, node, by_mean[node.args[5]])  # type: ignore[index]
    ]
    for norm in norms:
        _write_statistics(rewriting, norm)
    for node, norm in backward:  # first, because it may use the ReLU's node, which rewriting the forward replaces
        done += _write_backward(rewriting, node, norm)
    for norm in norms:
        done += _write_forward(rewriting, norm)
    return rewriting.done(), ", ".join(f"{count} {kind}" for kind, count in done.items())


def _matched(rewriting: Rewriting, node: Node, taken: set[Node | None]) -> _Norm:
    """The normalisation and the operations to fuse with it; ``taken`` are additions fused with other normalisations."""
    y = next(iter(parts(node).get(0, ())), None)
    norm = _Norm(node, y)
    following = _only_user(y)
    if following in taken:
        return norm
    if following is not None and following.target in _ADD and following.kwargs.get("alpha", 1) == 1:
        first, second = following.args[:2]
        # An in-place sum is in the memory of its first operand: that has to be the normalisation's result.
        other = second if first is y else first if following.target is _aten.add.Tensor else None
        if isinstance(other, Node) and other is not y and _same_form(other, node.args[0]):
            norm.addition = following
            following = _only_user(following)
    if following is not None and following.target in _RELU:
        norm.relu = following
    moved: list[object] = [*norm.inputs]
    if not rewriting.unchanged(moved, node, norm.last):
        return _Norm(node, y)
    if norm.addition is not None and not rewriting.unchanged([norm.added], norm.addition, norm.last):
        return _Norm(node, y)
    return norm


def _is_whole(rewriting: Rewriting, norm: _Norm) -> bool:
    """Whether nothing uses the statistics, or touches the running ones, before the last of the fused operations."""
    if norm.y is None:
        return False
    users = [user for number in (1, 2) for part in parts(norm.node).get(number, ()) for user in part.users]
    last = rewriting.place(norm.last)
    later = all(user.op == "output" or rewriting.place(user) > last for user in users)
    return later and rewriting.untouched(norm.node.args[3:5], norm.node, norm.last)


def _only_user(node: Node | None) -> Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _fits(node: Node) -> bool:
    arguments: Any = node.args
    x, weight, bias, mean, variance, training = arguments[:6]
    channels = [None if channel is None else channel.meta["val"] for channel in (weight, bias, mean, variance)]
    return bool(training) and kernels.fits_form(x.meta["val"], *channels)


def _same_form(first: Any, second: Any) -> bool:
    a, b = first.meta["val"], second.meta["val"]
    same = isinstance(a, torch.Tensor) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return same and kernels.fits_form(a) and kernels.fits_form(b)


# Forward


def _write_statistics(rewriting: Rewriting, norm: _Norm) -> None:
    """Replace the normalisation by our statistics, or by memory for them; its result is written later."""
    node = norm.node
    forms = tuple(node.meta["val"][1:3])
    with rewriting.graph.inserting_before(node):
        if norm.whole:
            norm.mean, norm.rstd = rewriting.empty(forms[0]), rewriting.empty(forms[1])
        else:
            both = rewriting.call(kernels.statistics, _of_statistics(norm), forms)
            norm.mean, norm.rstd = rewriting.part(both, 0), rewriting.part(both, 1)
    for number, computed in ((1, norm.mean), (2, norm.rstd)):
        for part in parts(node).get(number, ()):
            part.replace_all_uses_with(computed)
            rewriting.graph.erase_node(part)


def _of_statistics(norm: _Norm) -> tuple[Any, ...]:
    """The arguments of an operation that computes the statistics."""
    arguments: Any = norm.node.args
    x, _, _, running_mean, running_variance, _, momentum, epsilon = arguments[:8]
    return x, running_mean, running_variance, momentum, epsilon


def _write_forward(rewriting: Rewriting, norm: _Norm) -> Counter[str]:
    """Write one kernel that computes the result of the last fused operation."""
    if norm.y is None:
        rewriting.graph.erase_node(norm.node)
        return Counter(forward=1)
    x, weight, bias = norm.inputs
    last = norm.last
    # The node that takes the result out may come after operations that follow the normalisation.
    with rewriting.graph.inserting_before(norm.node if last is norm.y else last):
        result = rewriting.empty(x.meta["val"])
        behind = (weight, bias, norm.added, norm.relu is not None)
        if norm.whole:
            rewriting.call(kernels.forward_, (result, norm.mean, norm.rstd, *_of_statistics(norm), *behind))
        else:
            rewriting.call(kernels.apply_, (result, x, norm.mean, norm.rstd, *behind))
    last.replace_all_uses_with(result)
    for node in (norm.relu, norm.addition, norm.y):
        if node is not None:
            rewriting.graph.erase_node(node)
    rewriting.graph.erase_node(norm.node)
    kind = "with addition and ReLU" if norm.addition and norm.relu else "with ReLU" if norm.relu else "alone"
    return Counter({f"forward {kind}": 1})


# Backward


def _fits_backward(rewriting: Rewriting, node: Node, norm: _Norm) -> bool:
    arguments: Any = node.args
    gradient, x, weight, *_ = arguments
    if not arguments[7] or x is not norm.inputs[0] or not rewriting.same(weight, norm.inputs[1]):
        return False
    return _same_form(gradient, x) and rewriting.unchanged(norm.inputs, norm.node, node)


def _write_backward(rewriting: Rewriting, node: Node, norm: _Norm) -> Counter[str]:
    arguments: Any = node.args
    gradient, x = arguments[:2]
    weight, bias = norm.inputs[1:]
    fused = _is_of_relu(rewriting, gradient, node, norm)
    incoming, more, result = gradient, None, None
    at = gradient if fused else node
    if fused:
        incoming, _, _ = gradient.args
        if (
            incoming.target is _aten.add.Tensor
            and not incoming.kwargs
            and _only_user(incoming) is gradient
            and _is_sum(incoming)
        ):
            incoming, more = incoming.args
        result = None if norm.added is None else norm.relu
    forms = tuple(
        node.meta["val"][number] if node.meta["val"][number] is not None else norm.mean.meta["val"]  # type: ignore[union-attr]
        for number in range(3)
    )
    with rewriting.graph.inserting_before(at):
        masked_gradient = None
        if fused and len(gradient.users) > 1:
            masked_gradient = rewriting.empty(gradient.meta["val"])
        inputs = (
            incoming,
            more,
            x,
            norm.mean,
            norm.rstd,
            weight,
            bias if fused else None,
            result,
            fused,
            masked_gradient,
        )
        whole = rewriting.call(kernels.backward, inputs, forms)
        gradients = [rewriting.part(whole, number) for number in range(3)]
    for number, old in parts(node).items():
        for part in old:
            part.replace_all_uses_with(gradients[number])
            rewriting.graph.erase_node(part)
    rewriting.graph.erase_node(node)
    if fused:
        if masked_gradient is not None:
            gradient.replace_all_uses_with(masked_gradient)
        rewriting.graph.erase_node(gradient)
    return Counter({"backward past the ReLU" if fused else "backward": 1})


def _is_of_relu(rewriting: Rewriting, gradient: Any, node: Node, norm: _Norm) -> bool:
    """Whether the gradient comes through the ReLU fused with this normalisation, and can be fused, too."""
    if norm.relu is None or gradient.target is not _aten.threshold_backward.default:
        return False
    incoming, result, threshold = gradient.args
    if result is not norm.relu or threshold != 0 or not _same_form(incoming, norm.inputs[0]):
        return False
    return rewriting.unchanged([*norm.inputs, norm.relu], norm.last, node)


def _is_sum(node: Node) -> bool:
    """Whether a node adds two tensors of the same form."""
    first, second = node.args[:2]
    return isinstance(first, Node) and isinstance(second, Node) and first is not second and _same_form(first, second)
