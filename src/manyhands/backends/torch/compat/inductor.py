"""Inductor: its passes, its processes, and compiling a graph without Dynamo.

Importing it takes seconds, so each function imports it when it is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from manyhands.backends.torch.compat import dynamo

_starting = threading.Lock()  # two threads at the same time would each start processes


def custom_graph_pass() -> Any:
    """The class of passes that Inductor runs over a graph, and whose identity is part of its cache's key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def prepare_inductor(arguments: Sequence[Any]) -> None:
    """If there are tensors on a GPU, import Inductor, and start the processes in which it compiles kernels.

    They need seconds until they are ready; kernels that are generated before are compiled one after the other, in this
    process. Called again, it wakes processes that have ended because nothing was compiled for a while. Errors are
    left to the compilation that follows.
    """
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments):
        return
    with _starting, suppress(Exception):
        from torch._inductor import compile_fx  # noqa: F401
        from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool

        maybe_warm_pool()
        AsyncCompile.wakeup()


def inductor_compile(
    module: torch.fx.GraphModule, inputs: list[torch.Tensor], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a graph with Inductor, without Dynamo, under these settings of Inductor; ``inputs`` are fake tensors."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with dynamo.compiling(), config.patch(settings):
        return cast(Callable[..., Any], compile_fx(module, inputs))
