"""Trees: tensors alone or nested in lists, tuples, dicts, named tuples and dataclasses.

A thin layer over optree with two differences. A plain ``@dataclass`` is a branch, not a leaf: its class is registered
in our namespace when it is first seen, and ``unflatten`` copies the instance without calling ``__init__``, so that
``__post_init__`` does not run twice. So is a ``UserDict``, as the batches of tokenizers are. And some classes that look
like named tuples, but are more than that, are leaves (:func:`keep_whole`).
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any

import optree

from manyhands.errors import BadBatch

_NAMESPACE = "manyhands"
_ENDLESS = "the tree is nested too deeply, or contains itself: it has no last leaf"
_lock = threading.Lock()
_branches: set[type] = set()
_no_branches: set[type] = set()
_whole: set[type] = set()

Structure = optree.PyTreeSpec


def flatten(tree: object, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves in order, and the structure from which ``unflatten`` rebuilds the tree.

    ``is_leaf``: what else is a leaf, in a framework that takes it apart itself.
    """
    branch: Any = tree
    whole = _leaf_test(is_leaf)
    try:
        leaves, structure = optree.tree_flatten(branch, whole, namespace=_NAMESPACE)
        while _new_branches(_kinds(leaves, is_leaf)):
            leaves, structure = optree.tree_flatten(branch, whole, namespace=_NAMESPACE)
    except RecursionError:
        raise BadBatch(_ENDLESS) from None
    return leaves, structure


def keep_whole(cls: type) -> None:
    """Make instances of this class leaves: they cannot be rebuilt from their parts."""
    _whole.add(cls)


def _is_whole(value: object) -> bool:
    return value.__class__ in _whole


def _leaf_test(is_leaf: Callable[[object], bool] | None) -> Callable[[object], bool] | None:
    """Whether a value is a leaf although it could be taken apart; None if none is."""
    if not _whole:
        return is_leaf
    return _is_whole if is_leaf is None else lambda value: _is_whole(value) or is_leaf(value)


def plain_leaves(tree: object) -> list[Any]:
    """The leaves of plain lists, tuples and dicts; every other value counts as a leaf.

    Several times faster than :func:`flatten`, and enough to see that there is nothing to do.
    """
    leaves: list[Any] = []
    try:
        _collect((tree,), leaves)
    except RecursionError:
        raise BadBatch(_ENDLESS) from None
    return leaves


def _collect(values: Iterable[Any], leaves: list[Any]) -> None:
    for value in values:
        kind = value.__class__
        if kind is dict:
            _collect(value.values(), leaves)
        elif kind is list or kind is tuple:
            _collect(value, leaves)
        else:
            leaves.append(value)


def map_leaves(function: Callable[[Any], Any], tree: object) -> Any:
    """Apply the function to every leaf, and return the results in the same tree."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(function, leaves))


def paths(structure: Structure, root: str = "") -> list[str]:
    """The path of each leaf as a Python expression: ``batch['x'][0].mask`` for root ``batch``."""
    return [accessor.codify(root) for accessor in structure.accessors()]


def _kinds(leaves: list[Any], is_leaf: Callable[[object], bool] | None) -> set[type]:
    """The types of leaves that could be branches."""
    if is_leaf is None:
        return set(map(type, leaves))
    return {kind for kind, leaf in {type(leaf): leaf for leaf in leaves}.items() if not is_leaf(leaf)}


def _new_branches(types: set[type]) -> bool:
    """Whether one of these leaf types is a dataclass or a UserDict.

    It is a branch from now on, so the tree must be flattened again. Also True if another thread has just made it a
    branch: it was still a leaf when this tree was flattened.
    """
    if types <= _no_branches:
        return False
    with _lock:
        branches = {cls for cls in types - _no_branches - _whole if dataclasses.is_dataclass(cls) or _is_dict(cls)}
        for cls in branches - _branches:
            _register(cls)
        _branches.update(branches)
        _no_branches.update(types - branches)
    return bool(branches)


def _is_dict(cls: type) -> bool:
    return issubclass(cls, UserDict)


def _register(cls: type) -> None:
    is_dict = _is_dict(cls)
    fields = () if is_dict else tuple(field.name for field in dataclasses.fields(cls))
    assign = setattr if issubclass(cls, dict) else object.__setattr__  # the latter also where frozen

    def take_apart(value: Any) -> tuple[Iterable[Any], Any, tuple[str, ...]]:
        parts = value.data if is_dict else {name: getattr(value, name) for name in fields if hasattr(value, name)}
        return parts.values(), _Mould(value, tuple(parts)), tuple(parts)

    def put_together(mould: Any, children: Iterable[Any]) -> Any:
        value = copy.copy(mould.value)
        parts = dict(zip(mould.fields, children, strict=True))
        if is_dict:
            value.data = parts
        else:
            for name, child in parts.items():
                assign(value, name, child)
        return value

    entry = optree.MappingEntry if is_dict else optree.GetAttrEntry
    optree.register_pytree_node(cls, take_apart, put_together, path_entry_type=entry, namespace=_NAMESPACE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mould:
    """The instance to copy, and its fields; moulds with the same fields are equal."""

    value: Any = dataclasses.field(compare=False, repr=False)
    fields: tuple[str, ...]
