"""Fake tensors, and the graphs of traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """make_fx generates the code of its graph modules only when it is needed: that takes half a second."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph that generates its code when it is first called."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def tensor_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the results of operations on a tensor have their forms from; conjugation and negation may be lazy."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
