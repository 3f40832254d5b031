"""What the tests of compiled traces share: a compiler that does nothing, and ways to trace and to run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture import call as torch_call
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.capture.whole import trace_whole
from manyhands.backends.torch.run.codegen import Plan

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)


def uncompiled(module: GraphModule, metas: Any) -> Callable[..., Any]:
    """A compiler that does nothing: its results are equal to the bit."""
    return module


def traced(function: Callable[..., Any], *arguments: Any) -> Trace:
    return trace_whole(function, torch_call.call(arguments, {})).trace


def results(found: Trace, *arguments: Any, threads: int | None = None) -> list[Any]:
    """What the trace gives on one lane, and what it has written to; with ``threads`` threads for each operation."""
    call = torch_call.call(arguments, {})
    count = len(found.steps)
    run = backend.thread_run(
        found, Plan(["cpu"], [0] * count, list(range(count)), {}), threads or torch.get_num_threads()
    )
    return backend.results_of(found, call.tensors, run.replay)


def step_of(net: nn.Module, cast: bool = False) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            answer = net(x)
        loss = nn.functional.cross_entropy(answer.float(), y)
        return loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))

    return step
