"""A trace compiled as one task: the same results and writes, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import needs_compiler, traced
from torch import nn

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.compat import FakeTensorMode, prepare_inductor
from manyhands.backends.torch.passes import compile_whole
from manyhands.backends.torch.run import threads
from manyhands.errors import CannotFuse
from manyhands.parallel import planner
from manyhands.parallel.plan import Executor, Method, Plan
from manyhands.parallel.planner import PlanningProgress
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import one_lane
from manyhands.schedule.memory import Peaks

BATCH = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def training_step() -> Callable[..., Any]:
    """With statistics, gradients, momentum and weights to write to."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(*BATCH)
    return step


def uncompiled(module: Any, metas: Any) -> Callable[..., Any]:
    """A compiler that does nothing: its results are equal to the bit."""
    return module  # type: ignore[no-any-return]


def apart(module: Any, metas: Any) -> Callable[..., Any]:
    """As Inductor does it: each input is memory of its own, and new values are written at the end."""

    def run(*tensors: torch.Tensor) -> Any:
        copies = [tensor.clone() for tensor in tensors]
        results = module(*copies)
        for tensor, new in zip(tensors, copies, strict=True):
            tensor.copy_(new)
        return results

    return run


def in_order(trace: Any) -> Any:
    return backend.thread_run(trace, one_lane(graph(trace.tasks)), 1).replay


def results(trace: Any, *tensors: torch.Tensor) -> list[Any]:
    """What a trace gives on one lane, and what it has written to."""
    return backend.results_of(trace, tensors, in_order(trace))


@pytest.mark.parametrize("compiler", [uncompiled, apart])
def test_a_training_step_writes_what_it_wrote(compiler: Any) -> None:
    """An optimizer without ``foreach`` scales its momentum, adds to it, and adds it to the weight: it is one input."""
    found = traced(training_step(), *BATCH)
    whole = compile_whole(found, compiler)
    assert len(whole.steps) == 1
    assert len(found.constants) == len({id(found.constant(node)) for node in found.constants})
    assert whole.callers_memories() & whole.written_memories() == found.callers_memories() & found.written_memories()
    assert backend.equal(results(whole, *BATCH), results(found, *BATCH)) == (True, 0.0)


def test_tensors_that_share_memory_are_not_compiled_as_one_task() -> None:
    memory = torch.zeros(12)
    first, second, third = memory[:8].view(2, 4), memory[4:8], memory[8:]

    def overlapping(x: torch.Tensor) -> torch.Tensor:
        first.add_(x)
        return second * 2

    def side_by_side(x: torch.Tensor) -> torch.Tensor:
        first.add_(x)
        return third * 2

    with pytest.raises(CannotFuse, match="memory that two of its tensors share"):
        compile_whole(traced(overlapping, torch.ones(2, 4)), uncompiled)
    assert compile_whole(traced(side_by_side, torch.ones(2, 4)), uncompiled).steps


def test_results_lie_in_memory_as_the_functions_do() -> None:
    def function(x: torch.Tensor) -> Any:
        return (x.sin() + 1).t() * 2, x.cos()

    x = torch.rand(3, 4)

    def compiler(module: Any, metas: Any) -> Callable[..., Any]:
        return lambda *given: [one.contiguous() for one in module(*given)]

    found = traced(function, x)
    first, second = results(compile_whole(found, compiler), x)
    assert (first.stride(), second.stride()) == tuple(one.stride() for one in function(x))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: nn.functional.dropout(x.sin().cos()), "draw different random numbers"),
        (lambda x: torch.linalg.cholesky(x @ x.t() + torch.eye(4)).sin(), "checks values"),
        (lambda x: x @ x, "single operation"),
    ],
)
def test_what_cannot_be_one_task_says_why(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(CannotFuse, match=why):
        compile_whole(traced(function, torch.rand(4, 4)), uncompiled)


@needs_compiler
def test_the_callers_autocast_does_not_count() -> None:
    """Casts are operations of the graph; the compiler must not cast again where the function has switched them off."""

    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            y = (x @ w).sin()
        return y + 1, x @ w

    arguments = torch.rand(8, 8), torch.rand(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = in_order(compile_whole(traced(function, *arguments)))(arguments)
        plain = function(*arguments)
    assert [value.dtype for value in compiled] == [value.dtype for value in plain] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(tuple(compiled), plain)


def test_compiled_code_that_stays_the_fastest_keeps_its_schedule() -> None:
    """After everything else was tried: its schedule has one task, and the graph that it was compiled from several."""
    x = torch.rand(500, 500, generator=torch.Generator().manual_seed(0))
    found = traced(lambda x: (x @ x).sin().sum(), x)
    whole, result = compile_whole(found, uncompiled), found.module(x)
    scheduled = one_lane(graph(threads.tasks(whole)))
    method = Method(Executor.THREADS, "whole graph", compiled=True)
    fast = Plan(
        lambda tensors: list(result), method, None, scheduled, peaks=Peaks(1, 1), left_after=9, timed=lambda: []
    )
    with PlanningProgress("f", shown=False) as progress:
        plan = planner.plan(found, [x], planner.PlanOptions(compile=True), progress, instead_of=fast)
    assert (plan.run, plan.schedule, plan.timed, plan.left_after) == (fast.run, scheduled, fast.timed, None)
    assert plan.seconds.keys() > {method}


def test_processes_are_started_for_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    started: list[str] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append("pool"))
    monkeypatch.setattr(async_compile.AsyncCompile, "wakeup", lambda: started.append("woken"))
    prepare_inductor([torch.rand(2), 3, None])
    assert not started
    with FakeTensorMode(allow_non_fake_inputs=True):
        prepare_inductor([torch.rand(2), torch.empty(2, device="cuda")])
    assert started == ["pool", "woken"]
