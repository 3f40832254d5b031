"""Runs of one kind, whether they are the fastest or not, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._pytree import tree_leaves  # noqa: E402

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.backends.torch.capture.call import call as call_of  # noqa: E402
from manyhands.backends.torch.capture.whole import trace_whole  # noqa: E402
from manyhands.backends.torch.run import cuda_graph, streams  # noqa: E402
from manyhands.parallel.costs import costs  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402
from manyhands.schedule.check import check  # noqa: E402
from manyhands.schedule.graph import graph  # noqa: E402
from manyhands.schedule.lanes import lanes_for, schedule  # noqa: E402

GPU = "cuda:0"


def scheduled(function: Callable[..., Any], lanes: int, *arguments: Any) -> tuple[Any, Any]:
    """The trace of a function, and a schedule of its tasks that is proved."""
    found = trace_whole(function, call_of(arguments, {})).trace
    program = graph(found.tasks)
    made = schedule(program, lanes_for(program, lanes))
    check(made)
    return found, made


class Forced:
    """One kind of run on so many lanes, whether it is faster or not."""

    def __init__(self, function: Callable[..., Any], lanes: int, kind: str) -> None:
        self.function, self.lanes, self.kind = function, lanes, kind
        self.made: Any = None

    def __call__(self, *arguments: Any) -> Any:
        call = call_of(arguments, {})
        if self.made is None or not self.made[0].holds():
            whole = trace_whole(self.function, call)
            found, device = whole.trace, planning.device_of(whole.trace)
            with planning.restore_after(found, call.tensors):
                measured = graph(costs(found, device).tasks)
            one = schedule(measured, lanes_for(measured, self.lanes), switch_seconds=1e-6)
            check(one)
            make: Any = cuda_graph.GraphRun if self.kind == "graph" else streams.StreamRun
            with planning.restore_after(found, call.tensors):
                self.made = (
                    whole,
                    (make(found, one, call.tensors, device) if self.kind == "graph" else make(found, one, device)),
                )
        whole, run = self.made
        return whole.result(run.replay(call.tensors))


def graph_run_of(fast: Parallel) -> Any:
    """The run behind a planned function's last call; the test is skipped where no graph won, on a busy GPU."""
    replay: Any = fast.planned.run
    if "graph" not in fast.planned.how:
        pytest.skip(f"{fast.planned.how} has won: is the GPU busy?")
    if isinstance(run := getattr(replay, "__self__", None), cuda_graph.GraphRun):
        return run
    owners = [getattr(cell.cell_contents, "__self__", None) for cell in replay.__closure__]
    (run,) = (owner for owner in owners if isinstance(owner, cuda_graph.GraphRun))
    return run


RUNS = [(1, "graph"), (4, "graph"), (8, "graph"), (1, "stream"), (4, "stream")]
each_run = pytest.mark.parametrize(("lanes", "kind"), RUNS, ids=lambda value: str(value))


def assert_same(one: Any, other: Any) -> None:
    ones, others = tree_leaves(one), tree_leaves(other)
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.device == b.device
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
        else:
            assert a == b


def chains(xs: list[Any], w: Any) -> list[Any]:
    results = []
    for x in xs:
        for _ in range(10):
            x = (x @ w).relu()
        results.append(x)
    return results
