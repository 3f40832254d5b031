"""Which operations of a trace are small: pure, and of a kind that a compiler fuses with others into one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import HIDDEN_VIEWS, Step, Trace
from manyhands.backends.torch.compat import FakeTensorMode, tree_leaves

_VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "reshape",
}  # fmt: skip
_REDUCTIONS = {
    "amax", "amin", "mean", "sum", "var", "var_mean", "std", "prod", "any", "all", "argmax", "argmin", "max", "min",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp",
    "linalg_vector_norm", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "native_group_norm_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "native_batch_norm_backward", "nll_loss_forward", "nll_loss_backward", "mse_loss_backward",
}  # fmt: skip
_OTHERS = {
    "_to_copy", "clone", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_full",
    "where", "scalar_tensor", "arange", "constant_pad_nd", "threshold_backward", "gelu_backward", "sigmoid_backward",
    "tanh_backward", "hardtanh_backward", "silu_backward", "elu_backward", "leaky_relu_backward",
}  # fmt: skip


def is_small(step: Step, written: set[int]) -> bool:
    """Whether an operation may be part of a region; ``written`` are memories that are written in place."""
    if step.task.token is not None or step.task.kind != "compute" or step.task.writes & written:
        return False
    target: Any = step.node.target
    schema = compat.schema(target)
    if schema is None or schema.is_mutable or target.namespace not in ("aten", "prims"):
        return False
    name = schema.name.partition("::")[2]
    known = name in _VIEWS or name in _REDUCTIONS or name in _OTHERS or torch.Tag.pointwise in target.tags
    values = [value for node in [*step.nodes, *step.node.all_input_nodes] for value in tensors(node)]
    return known and len({value.device for value in values if value.dim()}) <= 1


def is_view(step: Step) -> bool:
    """Whether an operation computes nothing: its result is in the memory of its argument."""
    schema = compat.schema(step.node.target)
    return step.node.target in HIDDEN_VIEWS or any(result.alias_info is not None for result in schema.returns)


def written_in_place(trace: Trace) -> set[int]:
    """Memories that an operation other than their maker writes to."""
    return {memory for step in trace.steps for memory in step.task.writes & step.task.reads}


def tensors(node: Node) -> Iterator[torch.Tensor]:
    """Fake tensors of an operation's results."""
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield value


def like(value: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake tensor of the same form, for the result of another operation of a trace."""
    with FakeTensorMode():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device or value.device)
