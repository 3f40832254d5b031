"""Makes fake tensors, and the graph of a trace, faster than PyTorch does by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map


class RememberingFakeMode(FakeTensorMode):
    """Fake tensors for a trace whose function takes real tensors from outside, as a model its weights.

    PyTorch remembers what an operation gives for fake tensors of certain forms, but does not look there when one of
    them is real, and works it out again for every layer. So real ones are made fake before it looks: a moment later
    they would be anyway.
    """

    def __init__(self) -> None:
        from torch._functorch import config
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # As make_fx(tracing_mode="fake") makes its own.
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            super().__init__(
                allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
            )

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = _kinds((*args, *(kwargs or {}).values()))
        # Of real ones alone PyTorch may know the numbers; and what changes a form is not for real ones.
        if FakeTensor in kinds and kinds & _REAL and torch.Tag.inplace_view not in func.tags:
            args, kwargs = tree_map(self._as_fake, (args, kwargs))
        return super().dispatch(func, types, args, kwargs)

    def _as_fake(self, value: Any) -> Any:
        return self.fake_tensor_converter.from_real_tensor(self, value) if type(value) in _REAL else value


_REAL = {torch.Tensor, torch.nn.Parameter}


def _kinds(values: Sequence[Any]) -> set[type]:
    """The types of an operation's arguments, those in lists too."""
    return {type(value) for value in values}.union(*(_kinds(value) for value in values if type(value) in (list, tuple)))


@contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """Modules of graphs that make_fx makes here have no code before somebody asks for it: that takes half a second."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph that writes its code when it is first called, not at once."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)
