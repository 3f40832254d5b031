"""``torch.compile(model, backend="manyhands")``: the whole graph is compiled first, regions when calls pay for them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from manyhands import torch as mh
from manyhands.backends.planning import GraphPlan
from manyhands.backends.torch import planning
from manyhands.backends.torch.dynamo import backend as dynamo
from manyhands.parallel.choose import compiled as choose_compiled
from manyhands.parallel.function import Parallel
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import AS_WRITTEN, Executor, Way
from manyhands.schedule.graph import graph as task_graph
from manyhands.schedule.lanes import one_lane
from manyhands.schedule.task import Task

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# When regions are compiled


class Trace:
    """Of tasks that are known."""

    passes: tuple[str, ...] = ()
    compiled_regions = 0

    def __init__(self, *tasks: Task) -> None:
        self.tasks = tasks


class Compiler:
    """Compiles the whole in some seconds of a clock that it sets, and notes what is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.now = 0.0
        monkeypatch.setattr(choose_compiled.time, "perf_counter", lambda: self.now)

    def fuse_whole(self, trace: Any) -> Trace:
        self.compiled.append("whole")
        self.now += 30
        return Trace(Task("fused"))

    def fuse(self, trace: Any) -> Trace:
        self.compiled.append("regions")
        return Trace(Task("fused sin"))


def plan(executor: Executor, *writes: int, reads: tuple[tuple[int, ...], ...] = ((), (), (), ())) -> Planned:
    """Of tasks of a millisecond each."""
    tasks = [
        Task(f"{number}", reads=frozenset(read), writes=frozenset({write}), seconds=1e-3)
        for number, (read, write) in enumerate(zip(reads, writes, strict=True))
    ]
    way = Way(executor, "one lane")
    return Planned(lambda *_: None, way, schedule=one_lane(task_graph(tasks)), seconds={AS_WRITTEN: 1.0, way: 4e-3})


BESIDE = (1, 2, 3, 4)
CHAIN = ((), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("executor", "reads", "later", "compiled", "after"),
    [
        # Four tasks side by side take 4 ms: lanes could save 3, and 30 s of compiling are won back in 10000 calls.
        (Executor.GRAPH, ((), (), (), ()), True, ["whole"], 10_000),
        # Two pairs one after the other: at most 2 ms.
        (Executor.GRAPH, ((), (), (1,), (2,)), True, ["whole"], 15_000),
        (Executor.GRAPH, CHAIN, True, ["whole"], None),
        (Executor.GRAPH, ((), (), (), ()), False, ["whole", "regions"], None),
        (Executor.THREADS, ((), (), (), ()), True, ["whole", "regions"], None),
    ],
)
def test_regions_wait_until_calls_can_pay_for_them(
    monkeypatch: pytest.MonkeyPatch, executor: Executor, reads: Any, later: bool, compiled: list[str], after: int | None
) -> None:
    backend: Any = Compiler(monkeypatch)
    planned = plan(executor, *BESIDE, reads=reads)
    slow = Planned(lambda *_: None)  # what is compiled is not used
    trace: Any = Trace(Task("sin"))
    trials = choose_compiled.Trials(backend, trace, lambda _: slow, lambda _: 4e-3)
    found = choose_compiled.better(planned, trials, whole=True, later=later)
    assert found is planned
    assert backend.compiled == compiled
    assert found.regions_after == after
    assert any("compiled regions are tried after" in note for note in found.notes) == (after is not None)


SIDE_BY_SIDE = ((), (), (), ())
FAST, SLOW = 1e-3, 4e-3  # seconds of a call


@pytest.mark.parametrize(
    ("reads", "later", "compiled", "lanes", "asked", "asked_later"),
    [
        # Compiled code wins: uncompiled operations wait, as regions do.
        (SIDE_BY_SIDE, True, FAST, "whole graph", ["fused"], ["as written", "fused sin"]),
        # Not where regions are tried at once: all are.
        (SIDE_BY_SIDE, False, FAST, "whole graph", ["fused", "as written", "fused sin"], []),
        # It does not win: then uncompiled operations are tried, and regions wait.
        (SIDE_BY_SIDE, True, None, "2 lanes", ["fused", "as written"], ["fused sin"]),
        (SIDE_BY_SIDE, False, None, "2 lanes", ["fused", "as written", "fused sin"], []),
        # Regions are of no use to a chain, but a graph of uncompiled operations may be.
        (CHAIN, True, FAST, "whole graph", ["fused"], ["as written"]),
        (CHAIN, True, None, "2 lanes", ["fused", "as written"], []),
    ],
)
def test_uncompiled_operations_wait_as_regions_do(
    monkeypatch: pytest.MonkeyPatch,
    reads: Any,
    later: bool,
    compiled: float | None,
    lanes: str,
    asked: list[str],
    asked_later: list[str],
) -> None:
    """``compiled``: the seconds of the compiled graph; None: it cannot be used."""
    backend: Any = Compiler(monkeypatch)
    plain = plan(Executor.GRAPH, *BESIDE, reads=reads)
    plain.way, plain.seconds = AS_WRITTEN, {AS_WRITTEN: 1.0}
    uncompiled, whole = plan(Executor.GRAPH, *BESIDE, reads=reads), plan(Executor.GRAPH, 1, reads=((),))
    uncompiled.way = Way(Executor.GRAPH, "2 lanes")
    seconds = {id(plain): 1.0, id(uncompiled): 2e-3, id(whole): compiled}
    seen: list[str] = []

    def choose(trace: Any) -> Planned:
        seen.append(trace.tasks[0].name)
        usable = {"as written": uncompiled, "fused": whole if compiled is not None else plain}
        return usable.get(seen[-1], Planned(lambda *_: None))

    trials: Any = choose_compiled.Trials(
        backend, Trace(Task("as written")), choose, lambda planned: seconds[id(planned)], postponed=True
    )
    found = choose_compiled.better(plain, trials, whole=True, later=later)
    assert found.way.lanes == lanes
    assert seen == asked
    assert (found.regions_after is not None) == bool(asked_later)
    if not asked_later:
        return
    seen.clear()
    seconds[id(found)] = SLOW  # they are timed again then
    trials = replace(trials, postponed=found.uncompiled_are_left)
    assert choose_compiled.with_regions(found, trials).way.lanes == "2 lanes"
    assert seen == asked_later


# What is done then


def test_a_better_plan_is_looked_for_once_when_it_is_due() -> None:
    x, asked = torch.rand(4), list[str]()

    def give(name: str) -> Any:
        def run(tensors: Any, arguments: tuple[Any, ...], keywords: Any) -> Any:
            asked.append(name)
            return [arguments[0].sin()]

        return run

    def better(arguments: tuple[Any, ...]) -> GraphPlan:
        asked.append("looked for")
        return GraphPlan(give("better"), in_graph=False, is_final=True)

    first = GraphPlan(give("first"), in_graph=False, is_final=True, later=(3, better))
    graph = dynamo._PlannedGraph(
        make_fx(lambda x: [x.sin()])(x), lambda function, reuse: lambda arguments: first, dynamo._Places(), None
    )
    for number in range(5):
        torch.testing.assert_close(graph(x + number), [(x + number).sin()])
    assert asked == ["first", "first", "looked for", "better", "better", "better"]
    assert len(graph._bound) == 1


def test_the_graph_runs_as_it_is_where_the_better_plan_is_none() -> None:
    x = torch.rand(4)
    first = GraphPlan(lambda *_: [x], in_graph=False, is_final=True, later=(2, lambda arguments: None))
    graph = dynamo._PlannedGraph(
        make_fx(lambda x: [x.sin()])(x), lambda function, reuse: lambda arguments: first, dynamo._Places(), None
    )
    assert graph(x)[0] is x
    for _ in range(2):
        torch.testing.assert_close(graph(x), [x.sin()])


def test_regions_are_compiled_with_the_arguments_of_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the whole graph is compiled first."""
    seen: list[Any] = []

    def wait(planned: Planned, *_: Any, later: bool, **__: Any) -> Planned:
        assert later
        planned.way, planned.regions_after = Way(Executor.THREADS, "whole graph"), 3
        return planned

    def regions(planned: Planned, trials: Any) -> Planned:
        seen.append(trials.seconds_of(planned) > 0)
        better = copy.copy(planned)
        better.way = Way(Executor.THREADS, "regions")
        return better

    monkeypatch.setattr(choose_compiled, "better", wait)
    monkeypatch.setattr(choose_compiled, "with_regions", regions)
    made: list[Parallel] = []
    planner = Parallel.planner
    monkeypatch.setattr(Parallel, "planner", lambda self: made.append(self) or planner(self))
    fast = torch.compile(lambda x: (x @ x).sin(), backend=mh.compile_backend)
    for number in range(6):
        x = torch.rand(4, 4)
        torch.testing.assert_close(fast(x), (x @ x).sin())
        assert not seen or number >= 2
    assert seen == [True]
    plans = [plan for plans in made[0]._plans._plans.values() for plan in plans]
    assert [plan.way.lanes for plan in plans] == ["regions"]
    assert plans[0].holds()


def test_what_fails_later_leaves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin()

    def fail(*_: Any) -> Planned:
        raise RuntimeError("no memory")

    monkeypatch.setattr(choose_compiled, "with_regions", fail)
    graph, x = Parallel(function, planning, synchronous=True), torch.rand(4, 4)
    planned = graph.plan_for((x,))
    found = graph._compile_regions(
        planned, planning.trace(function, planning.call((x,), {})), None, planning.call((x,), {})
    )
    assert found is planned
    assert "compiled regions: not used: RuntimeError: no memory" in planned.notes
