"""What the operations of a step are for the modes around it: the memory they touch, and which give weight gradients.

A dispatch mode sees operations, not layers. PyTorch knows which node of autograd's graph calls an operation, and where
its results go (``next_functions``). So a call is known to compute a gradient that goes straight to a parameter, which
nothing else needs. For example the backward of a linear layer, y = x @ w.t() + b, calls two products and a sum. The
product that reads the saved input is the weight's gradient. If input and weight share memory, the two products cannot
be distinguished, and both count as needed.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import memory_id, tree_leaves
from manyhands.training.torch.fast.python_state import has_hook


def memories_of(values: Any) -> set[int]:
    """The ids of the storages of all tensors in a tree."""
    return {memory_id(leaf) for leaf in tree_leaves(values) if has_memory(leaf)}


def has_memory(value: Any) -> bool:
    """Whether this is a tensor with exactly one storage; a sparse tensor has several."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def is_view(func: Any) -> bool:
    """Whether an operation only returns a view of an argument, and neither reads nor writes its memory."""
    schema = compat.schema(func)
    infos = [entry.alias_info for entry in (*schema.arguments, *schema.returns)]
    known = [info for info in infos if info is not None]
    return bool(known) and not any(info.is_write for info in known)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation's schema says it writes to."""
    written = []
    for number, argument in enumerate(compat.schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return written


_aten = torch.ops.aten
_LEAF = "torch::autograd::AccumulateGrad"
_PASSED = ("ToCopyBackward0", "TBackward0")  # allowed between a weight and its operation: a cast, a transposition
# For autograd nodes of products: the name of the saved input, and the positions of weight and bias.
_PRODUCTS: dict[str, tuple[str, int, int | None]] = {
    "AddmmBackward0": ("mat1", 2, 0),
    "MmBackward0": ("self", 1, None),
}


def side_lane_kind(func: Any, args: tuple[Any, ...]) -> str | None:
    """The kind of weight gradient that this call computes, in words; None if the backward pass needs its result."""
    if func is _aten.convolution_backward.default:
        return _of_convolution(args)
    if func is _aten.mm.default:
        return _of_product(args)
    if func is _aten.sum.dim_IntList:
        return _of_bias()
    if func is _aten.embedding_dense_backward.default:
        return _of_embedding()
    return None


def multiplications(tensor: torch.Tensor, other: torch.Tensor) -> int:
    """The number of multiplications in a product of two matrices."""
    return tensor.shape[0] * tensor.shape[1] * other.shape[1]


def is_cast_of_weight_gradient() -> bool:
    """Whether the current operation casts a gradient on its way to a parameter."""
    node = _node()
    return node is not None and node.name() in _PASSED and _path(node) is not None


def _of_convolution(args: tuple[Any, ...]) -> str | None:
    for_input, for_weight, for_bias = args[-1]
    node = _node()
    if not for_weight or node is None or node.name() != "ConvolutionBackward0":
        return None
    if not _is_straight(node, 1) or (for_bias and not _is_straight(node, 2)):
        return None
    return f"convolution, weight{' and bias' if for_bias else ''}{'' if for_input else ' (no gradient of the input)'}"


def _of_product(args: tuple[Any, ...]) -> str | None:
    node = _node()
    if node is None or node.name() not in _PRODUCTS:
        return None
    saved, weight, _ = _PRODUCTS[node.name()]
    if not _is_straight(node, weight):
        return None
    try:
        source, weight_saved = compat.saved_tensor(node, saved), compat.saved_tensor(node, "mat2")
    except RuntimeError:  # saved by hooks (checkpointing), which allow one read
        return None
    memories = {memory_id(argument) for argument in args}
    # A node saves only what it needs: if it has not saved its input, it does not compute the weight's gradient.
    if (
        source is None
        or memory_id(source) not in memories
        or (weight_saved is not None and memory_id(weight_saved) in memories)
    ):
        return None
    return "product, weight"


def _of_bias() -> str | None:
    node = _node()
    if node is None or node.name() not in _PRODUCTS:
        return None
    place = _PRODUCTS[node.name()][2]
    return "product, bias" if place is not None and _is_straight(node, place) else None


def _of_embedding() -> str | None:
    node = _node()
    return "embedding" if node is not None and node.name() == "EmbeddingBackward0" and _is_straight(node, 0) else None


def _node() -> Any:
    return compat.current_autograd_node()


def _is_straight(node: Any, number: int) -> bool:
    """Whether a result of the node goes to a parameter without hooks, at most through casts."""
    path = _path(node.next_functions[number][0])
    if path is None:
        return False
    return not has_hook(path[-1].variable, compat.HOOKS_OF_PARAMETERS)


def leads_to(node: Any, parameter: torch.Tensor) -> list[Any] | None:
    """The nodes from this one to the parameter: casts and transpositions. None if it leads elsewhere."""
    path = _path(node)
    return path if path is not None and path[-1].variable is parameter else None


def _path(node: Any) -> list[Any] | None:
    """The nodes from this one to a leaf, both included; None if it does not go straight to a leaf."""
    path = [node]
    while path[-1] is not None and path[-1].name() in _PASSED:
        path.append(path[-1].next_functions[0][0])
    return path if path[-1] is not None and path[-1].name() == _LEAF else None
