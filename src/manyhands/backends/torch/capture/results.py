"""Results that are dataclasses, shapes, or losses after their backward pass: they are rebuilt at every call.

PyTorch's pytrees end at a dataclass, and turn a ``torch.Size`` into a tuple. So where a function returns a dataclass,
it is replaced, during tracing, by its parts, which are a node of the tree. From that node a dataclass is built again,
without ``__init__``, so that a ``__post_init__`` does not run twice.

``Pair(x + 1, 2)`` becomes ``Parts(Pair, ("first", "second"), (x + 1, 2))``; built from other values, that is a
``Pair``.

``loss.backward(); optimizer.step(); return loss`` is how people write a step. Such a loss still requires gradients, but
its graph is freed: a second backward pass is an error. It is traced as its value, ``FreedGraph(value)``; the tensor
that is built from another value requires gradients, and refuses a backward pass in PyTorch's own words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import SUPPORTED_NODES, register_pytree_node, tree_map, tree_unflatten
from manyhands.python_code.generated import function

if TYPE_CHECKING:
    from manyhands.backends.torch.capture.trace import Trace


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an object is rebuilt from."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class FreedGraph:
    """The value of a tensor whose graph a backward pass has freed."""

    value: torch.Tensor


def opened(result: Any) -> Any:
    """A copy of the result in which dataclasses, shapes and used-up losses are replaced by their parts."""
    return tree_map(_taken_apart, result, is_leaf=_can_be_opened)


def _can_be_opened(value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None and _has_freed_graph(value.grad_fn)
    if (
        not dataclasses.is_dataclass(value)
        or isinstance(value, (type, Parts, FreedGraph))
        or type(value) in SUPPORTED_NODES
    ):
        return False
    names = {field.name for field in dataclasses.fields(value)}
    return set(getattr(value, "__dict__", names)) == names and all(hasattr(value, name) for name in names)


def _taken_apart(value: Any) -> Any:
    if not _can_be_opened(value):
        return value
    if isinstance(value, torch.Size):
        return Parts(torch.Size, (), tuple(value))
    if isinstance(value, torch.Tensor):
        return FreedGraph(value.detach())
    names = tuple(field.name for field in dataclasses.fields(value))
    return Parts(type(value), names, tuple(opened(getattr(value, name)) for name in names))


def _put_together(values: Iterable[Any], known: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = known
    if kind is torch.Size:
        return torch.Size(values)
    instance: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # also where it is frozen
    return instance


register_pytree_node(Parts, lambda parts: (list(parts.values), (parts.kind, parts.names)), _put_together)


# Graphs that are used up

_FREED = "after they have already been freed"
# PyTorch's words when a freed tensor is accessed.
_SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


def _has_freed_graph(node: Any) -> bool:
    """Whether a backward pass from here would reach an operation whose saved tensors are freed."""
    seen, left = {node}, [node]
    while left:
        node = left.pop()
        if _is_freed(node):
            return True
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        left += following
    return False


def _is_freed(node: Any) -> bool:
    for name in compat.saved_attributes(node):
        try:
            getattr(node, name)
        except RuntimeError as error:
            if _FREED in str(error):
                return True
        except Exception:  # a saved value that Python cannot read says nothing
            continue
    return False


class _Refuses(torch.autograd.Function):
    """Makes a tensor require gradients that can no longer be computed."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)  # the graph is attached to the value itself, not to a view
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(_SECOND_TIME)


def with_freed_graph(value: torch.Tensor) -> torch.Tensor:
    """The value as a tensor that requires gradients and refuses a backward pass."""
    # With reuse_outputs the same tensor is returned again and again: it must not collect graphs.
    if type(value) is torch.Tensor:
        result = torch.empty(0, dtype=value.dtype, device=value.device)
        result.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    else:  # on a virtual device: a wrapper, made anew at every call
        result = value.detach()
    with torch.enable_grad():
        return cast(torch.Tensor, _Refuses.apply(torch.zeros((), requires_grad=True), result))  # type: ignore[no-untyped-call]


def _marked_freed(values: Iterable[Any], _: None) -> Any:
    (value,) = values
    return with_freed_graph(value) if isinstance(value, torch.Tensor) else FreedGraph(value)


register_pytree_node(FreedGraph, lambda holder: ([holder.value], None), _marked_freed)


def together(trace: Trace) -> Callable[[Sequence[Any]], Any]:
    """Makes the function's result of a run's values; gradients go where the function would have put them."""
    build = _builder(trace.structure)
    if not trace.gradients:
        return build
    count = len(trace.outputs) - sum(there for _, there in trace.gradients)

    def with_gradients(values: Sequence[Any]) -> Any:
        gradients = iter(values[count:])
        for tensor, there in trace.gradients:
            tensor.grad = next(gradients) if there else None
        return build(values[:count])

    return with_gradients


def _builder(structure: Any) -> Callable[[Sequence[Any]], Any]:
    """Builds a result from its leaves: by one generated expression if it is of plain lists, tuples and dicts."""
    names: dict[str, Any] = {}

    def text(value: Any) -> str:
        if type(value) is int:
            return f"v[{value}]"
        if type(value) in (list, tuple):
            inner = "".join(f"{text(part)}, " for part in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        if type(value) is FreedGraph:
            names["with_freed_graph"] = with_freed_graph
            return f"with_freed_graph({text(value.value)})"
        if type(value) is dict:
            names.update({f"k{len(names) + number}": key for number, key in enumerate(value)})
            keys = list(names)[len(names) - len(value) :]
            return "{" + ", ".join(f"{key}: {text(value[names[key]])}" for key in keys) + "}"
        raise TypeError

    try:  # a tree with the number of each leaf in its place
        source = text(tree_unflatten(list(range(structure.num_leaves)), structure))
    except TypeError:
        return lambda values: tree_unflatten(list(values), structure)
    return function("result", f"def together(v):\n    return {source}", names)
