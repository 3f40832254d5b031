"""Functions traced, scheduled and run on lanes of CPU threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.call import call
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.capture.whole import trace_whole
from manyhands.backends.torch.run import threads as torch_threads
from manyhands.backends.torch.run.threads import ThreadRun
from manyhands.schedule.check import check
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Schedule, lanes_for, schedule
from manyhands.schedule.task import Task


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Trace, list[torch.Tensor]]:
    made = call(arguments, {})
    return trace_whole(function, made).trace, made.tensors


def scheduled(trace: Trace, lanes: int, tasks: Sequence[Task] | None = None, way: Any = schedule) -> Schedule:
    tasks = torch_threads.tasks(trace) if tasks is None else tasks
    planned: Schedule = way(graph(tasks), lanes_for(graph(tasks), lanes))
    check(planned)
    return planned


def run_on(function: Callable[..., Any], lanes: int, *arguments: Any) -> ThreadRun:
    trace, _ = traced(function, *arguments)
    return ThreadRun(trace, planning.plan_of(scheduled(trace, lanes)), lanes)
