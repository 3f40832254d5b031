"""What tests of captured graphs share: functions traced, scheduled and run on lanes of CPU threads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from manyhands.backends.torch.capture.call import call
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.capture.whole import trace_whole
from manyhands.backends.torch.dynamo.backend import GraphPlan, compile_with
from manyhands.backends.torch.run import threads
from manyhands.backends.torch.run.threads import ThreadRun
from manyhands.parallel.function import Parallel
from manyhands.schedule.check import check
from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Schedule, lanes_for, schedule

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)


def traced(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Trace:
    return trace_whole(function, call(arguments, keywords)).trace


def planned(function: Callable[..., Any]) -> Parallel:
    """With the traced code always used, in the caller's thread: what it computes is what is looked at."""
    return Parallel(function, pure=True, synchronous=True)


def scheduled(trace: Trace, lanes: int, tasks: Sequence[Task] | None = None, way: Any = schedule) -> Schedule:
    program = graph(threads.tasks(trace) if tasks is None else tasks)
    made: Schedule = way(program, lanes_for(program, lanes))
    check(made)
    return made


def run_on(function: Callable[..., Any], lanes: int, *arguments: Any) -> ThreadRun:
    trace = traced(function, *arguments)
    return ThreadRun(trace, scheduled(trace, lanes), lanes)


def captured(
    model: Callable[..., Any], *batches: torch.Tensor, calls: int = 2, planned: bool = False, **options: Any
) -> list[tuple[Any, list[torch.Tensor], tuple[int, bool]]]:
    """The graphs that PyTorch makes of a model and its backward pass, with arguments of a call.

    And the number of the call, and whether it is a backward graph. Each gets a plan, or runs as it is.
    """
    graphs: list[tuple[Any, list[torch.Tensor], tuple[int, bool]]] = []
    number = 0

    def make(role: Any) -> Any:
        def planner(graph: Any, arguments: tuple[Any, ...]) -> GraphPlan | None:
            graphs.append((graph, list(arguments), (number, role.is_backward)))
            return GraphPlan(lambda tensors: graph(*tensors), in_graph=False) if planned else None

        return planner

    compiled = torch.compile(model, backend=lambda module, inputs: compile_with(module, inputs, make), **options)
    for x in batches:
        for number in range(calls):  # noqa: B007
            result = compiled(x)
            if result.requires_grad:
                result.sum().backward()
    return graphs


def by_dynamo(function: Callable[..., Any], *, backward: bool = False) -> Callable[..., Any]:
    """What parallel is held to where Dynamo itself differs; ``backward``: with backward passes in its graphs."""
    compiled = torch.compile(function, backend="aot_eager")

    def call(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=backward):
            return compiled(*arguments)

    return call
