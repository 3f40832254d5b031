"""The passes over the graphs of a compiled step: chosen convolutions, then gradients on side lanes.

A dispatch mode sees nothing of a compiled step, so what modes do to other steps is done to its graphs, before Inductor
makes kernels of them:

    y = convolution(x, w, bias)                 y = manyhands.convolution(x, w, None) + bias
    dx, dw = convolution_backward(g, x, w)      dx, dw = manyhands.convolution_backward(g, x, w)

The operations of :mod:`manyhands.backends.torch.convolutions.operations` look up the way of each call when it is made.
So the graphs do not depend on the choice, and Inductor finds them in its cache again. The bias is added outside of the
convolution, as Inductor itself does it: an addition that is fused with what follows costs almost nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from typing import Any

import torch
from torch.fx import Graph, Node

from manyhands.backends.torch import compat
from manyhands.backends.torch.convolutions import operations, problems

_CustomGraphPass: Any = compat.custom_graph_pass()
_aten = torch.ops.aten


class StepPasses(_CustomGraphPass):  # type: ignore[misc]
    """Passes, one after the other: ``torch.compile(f, options={"post_grad_custom_post_pass": StepPasses(...)})``."""

    def __init__(self, *passes: Any) -> None:
        self._passes = passes

    def __call__(self, graph: Graph) -> None:
        for change in self._passes:
            change(graph)

    def uuid(self) -> bytes:
        return hashlib.sha256(b"".join(change.uuid() for change in self._passes)).digest()


class UseChosenConvolutions(_CustomGraphPass):  # type: ignore[misc]
    """Replaces PyTorch's convolutions by operations that compute each in its chosen way."""

    def __call__(self, graph: Graph) -> None:
        replaced = 0
        for node in list(graph.nodes):
            values: tuple[Any, ...] = tuple(arg.meta.get("val") if isinstance(arg, Node) else arg for arg in node.args)
            if node.target not in operations.REPLACEMENTS or not operations.problems_of(node.target, values):
                continue
            if not _is_in_its_layout(values[0]):
                continue
            if node.target is _aten.convolution.default and node.args[2] is not None:
                _add_bias_after(graph, node)
            node.target = operations.REPLACEMENTS[node.target]
            replaced += 1
        if replaced:
            graph.lint()

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: it changes with the code of these files."""
        sources = [inspect.getsource(module) for module in (operations, problems, sys.modules[__name__])]
        return hashlib.sha256(repr(sources).encode()).digest()


def _is_in_its_layout(image: torch.Tensor) -> bool:
    """Whether Inductor would leave an image as it is: on a GPU it converts others to channels_last."""
    return image.device.type == "cpu" or image.is_contiguous(memory_format=torch.channels_last)


def _add_bias_after(graph: Graph, node: Node) -> None:
    bias: Any = node.args[2]
    with graph.inserting_after(node):
        view = graph.call_function(_aten.view.default, (bias, [-1, *[1] * (node.meta["val"].dim() - 2)]))
    with graph.inserting_after(view):
        added = graph.call_function(_aten.add.Tensor, (node, view))
    view.meta["val"] = bias.meta["val"].view(view.args[1])
    added.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    node.update_arg(2, None)
