"""The module that each operation of a trace belongs to, by its path in the model: ``layers.0.attention``.

In the forward pass it is the innermost ``nn.Module`` whose call is on Python's stack. In the backward pass it is the
module whose forward operation created the node of autograd's graph that runs: autograd numbers its nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from manyhands.backends.torch import compat

_META = "manyhands_module_path"


def module_path(node: Node) -> str:
    """The path of the module that a node of a trace belongs to; empty if there is none, or it is the model itself."""
    return str(node.meta.get(_META, ""))


class ModulePaths:
    """Marks the nodes of one trace with the paths of their modules."""

    def __init__(self) -> None:
        self._by_autograd_number: dict[int, str] = {}
        self._names: dict[int, tuple[nn.Module, dict[int, str]]] = {}  # the paths below each outermost module

    @contextmanager
    def marking(self) -> Iterator[None]:
        """A context around one operation: the nodes that it adds to the trace are marked."""
        path, mode = self._current(), get_proxy_mode()
        if not path or mode is None:
            yield
            return
        nodes = mode.tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        yield
        for node in reversed(nodes):
            if node is last:
                break
            node.meta[_META] = path

    def _current(self) -> str:
        backward = compat.current_autograd_node()
        if backward is not None:
            return self._by_autograd_number.get(compat.autograd_number(backward), "")
        path = self._path(_called_modules())
        # An operation that creates no node finds the number of the one before it.
        self._by_autograd_number.setdefault(compat.last_autograd_number(), path)
        return path

    def _path(self, modules: list[nn.Module]) -> str:
        """The path of the innermost module in the outermost one that contains it."""
        for outer in reversed(modules):
            if id(outer) not in self._names:
                self._names[id(outer)] = outer, {id(module): name for name, module in outer.named_modules()}
            if (path := self._names[id(outer)][1].get(id(modules[0]))) is not None:
                return path
        return ""


def _called_modules() -> list[nn.Module]:
    """The modules whose calls are on the stack, the innermost first."""
    modules, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code is compat.MODULE_CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return modules
