"""Finds the fastest Python function for an operation: PyTorch's generated binding, if it calls the same operation.

A trace names operations by their overloads (``aten.add.Tensor``). Calling an overload matches its arguments with the
schema one by one; ``torch.add`` is generated code and takes half the time, for small tensors half of the whole call.
But ``torch.add`` chooses its overload by its arguments, and some functions of that name do more than the operation. So
each candidate is called once, on fake tensors, with a listener at the dispatcher. It is used only if the dispatcher
receives exactly the traced operation with exactly its arguments. Otherwise the overload itself is called.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import FakeTensorMode, OpOverload, TorchDispatchMode, no_dispatch_modes

# In-place updates of all weights of an optimizer; their first two arguments are the weights and the gradients.
_FUSED_UPDATES = ("aten._fused_sgd_.", "aten._fused_adam_.", "aten._fused_adamw_.", "aten._fused_adagrad_.")
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType)
_aten = torch.ops.aten
_MANY = 4096
_known: dict[Any, Callable[..., Any]] = {}


def native(node: Node) -> Callable[..., Any]:
    """The function to call for an operation of a trace."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if str(target).startswith(_FUSED_UPDATES):
        return _of_any_layout(target)
    if target is _aten.mkldnn_rnn_layer.default:
        return _recurrent_layer
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not _is_simple(node):
        return target
    key = node_key(node)
    if key not in _known:
        if len(_known) > _MANY:
            _known.clear()
        name = compat.schema(target).name.removeprefix("aten::")
        bindings = [getattr(place, name, None) for place in compat.BINDINGS]
        same = (binding for binding in bindings if isinstance(binding, _BUILTIN) and _is_same(binding, node))
        _known[key] = next(same, target)
    return _known[key]


def _of_any_layout(update: Callable[..., Any]) -> Callable[..., Any]:
    """A fused update for gradients of any layout: PyTorch's requires gradients with the layout of their weights.

    Autograd ensures that when it accumulates a gradient, but a trace only saw fake gradients: a library's kernel may
    return strides other than those its meta function reports.
    """

    def update_in_layout(weights: list[torch.Tensor], gradients: list[torch.Tensor], *others: Any, **named: Any) -> Any:
        pairs = zip(gradients, weights, strict=True)
        laid_out = [g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in pairs]
        return update(weights, laid_out, *others, **named)

    return update_in_layout


def _recurrent_layer(*arguments: Any, **named: Any) -> tuple[Any, ...]:
    """An LSTM layer on the CPU: it saves what its backward pass needs only while gradients are enabled."""
    with torch.enable_grad():
        results = _aten.mkldnn_rnn_layer.default(*arguments, **named)
    return tuple(result.detach() if isinstance(result, torch.Tensor) else result for result in results)


def _is_simple(node: Node) -> bool:
    """Excludes operations that create tensors from nothing (a default device would matter) or draw random numbers."""
    name = str(node.target).removeprefix("aten.")
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return bool(node.all_input_nodes) and not seeded and "_like" not in name and not name.startswith("new_")


class _Listener(TorchDispatchMode):
    """Records the calls that reach the dispatcher. It runs none of them: the trace knows their results."""

    def __init__(self, node: Node) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: list[tuple[Any, list[Any]]] = []
        self._node = node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **(kwargs or {}))
        self.heard.append((func, _written_out(func, args, kwargs or {})))
        return self._node.meta["val"] if func is self._node.target else func(*args, **(kwargs or {}))


def _is_same(candidate: Callable[..., Any], node: Node) -> bool:
    """Whether calling the candidate calls exactly this operation."""
    try:
        with no_dispatch_modes(), torch.no_grad(), FakeTensorMode():
            arguments: Any = map_arg(node.args, _fake)
            named: Any = map_arg(node.kwargs, _fake)
            expected = _written_out(node.target, arguments, named)
            with _Listener(node) as listener:
                candidate(*arguments, **named)
    except Exception:  # the candidate takes other arguments, or does not support fake tensors
        return False
    if len(listener.heard) != 1 or listener.heard[0][0] is not node.target:
        return False
    return all(map(_same_value, listener.heard[0][1], expected))


def _fake(node: Node) -> torch.Tensor:
    return compat.empty_as(node.meta["val"])


def _written_out(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in the schema's order, including omitted ones."""
    return [value for _, value in compat.arguments(func, args, kwargs)]


def _same_value(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same_value, first, second))
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first is second
    return type(first) is type(second) and bool(first == second)


def node_key(node: Node) -> tuple[Any, ...]:
    """Equal for operations that take equally long: the target, and the shapes, strides and dtypes of its tensors."""

    def describe(source: Node) -> Any:
        meta = source.meta.get("val")
        return str(compat.tensor_form(meta) if isinstance(meta, torch.Tensor) else type(meta))

    return str(node.target), repr(map_arg(node.args, describe)), repr(map_arg(node.kwargs, describe))
