"""Which memory a PyTorch operation reads and writes; for the dispatch modes of a step."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import memory_id, tree_leaves


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
