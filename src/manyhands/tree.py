"""Trees: tensors alone or nested in lists, tuples, dicts, named tuples and dataclasses.

A thin layer over optree with one addition: a plain ``@dataclass`` is a branch, not a leaf. Its class
is registered (in a namespace of ours) when one is first seen, and put together again as a copy,
without calling ``__init__``, so that a ``__post_init__`` does not run twice.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import optree

from manyhands.errors import BadBatch

_NAMESPACE = "manyhands"
_ENDLESS = "the tree is nested too deeply, or contains itself: it has no last leaf"
_seen: set[type] = set()

Structure = optree.PyTreeSpec


def flatten(tree: object) -> tuple[list[Any], Structure]:
    """The leaves in order, and the structure that puts them together again (``unflatten``)."""
    branch: Any = tree
    try:
        leaves, structure = optree.tree_flatten(branch, namespace=_NAMESPACE)
        while not _seen.issuperset(types := set(map(type, leaves))) and _register_dataclasses(types):
            leaves, structure = optree.tree_flatten(branch, namespace=_NAMESPACE)
    except RecursionError:
        raise BadBatch(_ENDLESS) from None
    return leaves, structure


def plain_leaves(tree: object) -> list[Any]:
    """The leaves as far as plain lists, tuples and dicts go; what else there is counts as a leaf.

    Several times quicker than :func:`flatten`: enough to see that nothing has to be done.
    """
    found: list[Any] = []
    try:
        _collect((tree,), found)
    except RecursionError:
        raise BadBatch(_ENDLESS) from None
    return found


def _collect(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        kind = value.__class__
        if kind is dict:
            _collect(value.values(), found)
        elif kind is list or kind is tuple:
            _collect(value, found)
        else:
            found.append(value)


def map_leaves(function: Callable[[Any], Any], tree: object) -> Any:
    """The same tree with every leaf replaced by what the function makes of it."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(function, leaves))


def paths(structure: Structure, root: str = "") -> list[str]:
    """Where each leaf stands, as one would write it: ``batch['x'][0].mask`` for root ``batch``."""
    return [accessor.codify(root) for accessor in structure.accessors()]


def _register_dataclasses(types: Iterable[type]) -> bool:
    """Make branches of those types that are dataclasses; True if there was a new one."""
    found = False
    for cls in types:
        if cls not in _seen and dataclasses.is_dataclass(cls) and _register(cls):
            found = True
        _seen.add(cls)
    return found


def _register(cls: type) -> bool:
    names = tuple(field.name for field in dataclasses.fields(cls))
    assign = setattr if issubclass(cls, dict) else object.__setattr__  # the latter also where frozen

    def take_apart(value: Any) -> tuple[tuple[Any, ...], _Mould, tuple[str, ...]]:
        present = tuple(name for name in names if hasattr(value, name))
        return tuple(getattr(value, name) for name in present), _Mould(value, present), present

    def put_together(mould: _Mould, children: Iterable[Any]) -> Any:
        value = copy.copy(mould.value)
        for name, child in zip(mould.fields, children, strict=True):
            assign(value, name, child)
        return value

    try:
        optree.register_pytree_node(
            cls,
            take_apart,
            put_together,  # type: ignore[arg-type]
            path_entry_type=optree.GetAttrEntry,
            namespace=_NAMESPACE,
        )
    except ValueError:  # another thread was first
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Mould:
    """The instance to shape a copy after, and its fields; moulds with the same fields are equal."""

    value: Any = dataclasses.field(compare=False, repr=False)
    fields: tuple[str, ...]
