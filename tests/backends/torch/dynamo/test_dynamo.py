"""``parallel(fn, compile=True)`` and ``torch.compile(model, backend="manyhands")``: lanes on top of a compiler."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.backends.torch.dynamo import backend as dynamo
from manyhands.backends.torch.passes import regions
from manyhands.errors import CannotFuse, EngineError
from manyhands.parallel.choose import compiled as choose_compiled
from manyhands.parallel.choose.compiled import Trials
from manyhands.parallel.function import Parallel
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import AS_WRITTEN, TO_THE_BIT, Exactness, Executor, Way, close
from manyhands.schedule.task import Task
from manyhands.training.torch.book import models

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# parallel(fn, compile=True)


@needs_compiler
def test_compiled_regions_are_candidates() -> None:
    torch.manual_seed(0)
    weights = [torch.rand(64, 64) for _ in range(2)]

    def function(x: torch.Tensor) -> Any:
        return [((x @ weight).sin() * 2 + 1).relu().sum(1) for weight in weights]

    fast = mh.parallel(function, compile=True)
    x = torch.rand(64, 64)
    for value, other in zip(fast(x), function(x), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4)
    explanation = fast.explain()
    assert "2 compiled regions: 4 tasks instead of" in explanation
    assert "fused, one lane" in explanation


ONE, TWO = Way(Executor.THREADS, "one lane"), Way(Executor.THREADS, "2 lanes")
FUSED = Way(Executor.THREADS, "one lane", compiled=True)


def _planned(way: Way, exactness: Exactness | None, seconds: dict[Way, float]) -> Planned:
    return Planned(run=lambda *_: way, way=way, exactness=exactness, seconds=seconds, predicted={})


class Found:
    def __init__(self, *names: str) -> None:
        self.passes: list[str] = []
        self.compiled_regions = sum(name.startswith("fused ") for name in names)
        self.tasks = [Task(name) for name in names]


class Backend:
    """Fuses into one region, or says why not."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def fuse(self, found: Any) -> Any:
        if self.reason:
            raise CannotFuse(self.reason)
        return Found("fused sin cos")


def test_the_faster_of_both_in_turns_is_taken() -> None:
    """What their own races said does not count: the machine may have been busier in one of them."""
    lanes = _planned(TWO, TO_THE_BIT, {AS_WRITTEN: 3.0, TWO: 0.8})
    words = "as exact as plain execution (0.98 of its error)"
    compiled = _planned(ONE, Exactness(False, words), {AS_WRITTEN: 2.0, ONE: 1.2})
    turns = {id(lanes): [0.9, 5.0, 1.0], id(compiled): [4.0, 0.7, 0.8]}
    result = choose_compiled.better(
        lanes, Trials(Backend(), Found("sin", "cos"), lambda _: compiled, lambda one: turns[id(one)].pop())
    )
    assert result is compiled
    assert result.how == f"fused, one lane, {words}"
    assert result.seconds == {AS_WRITTEN: 2.0, TWO: 0.9, FUSED: 0.7}
    assert result.seconds[result.way] == 0.7
    assert result.notes == ["1 compiled region: 1 task instead of 2"]


@pytest.mark.parametrize(
    ("before", "beside", "races"),
    [(4.0, 5.0, 0), (4.0, 1.5, 6), (1.5, 4.0, 6)],
    ids=["clear at two moments", "not when compiled code was timed", "not when it was timed alone"],
)
def test_a_clear_lead_over_plain_execution_needs_no_race(before: float, beside: float, races: int) -> None:
    plain = _planned(AS_WRITTEN, None, {AS_WRITTEN: before})
    compiled = _planned(ONE, close(1e-7), {AS_WRITTEN: beside, ONE: 1.0})
    timed: list[Any] = []

    def seconds_of(plan: Any) -> float:
        timed.append(plan)
        return 2.0 if plan is plain else 1.0

    trials: Any = Trials(Backend(), Found("sin", "cos"), lambda _: compiled, seconds_of)
    assert choose_compiled.better(plain, trials) is compiled
    assert len(timed) == races


def test_operations_as_they_are_stay_where_they_are_faster() -> None:
    lanes = _planned(TWO, TO_THE_BIT, {AS_WRITTEN: 1.0, TWO: 0.8})
    for compiled in (
        _planned(ONE, close(1e-7), {AS_WRITTEN: 1.0, ONE: 0.7}),
        _planned(AS_WRITTEN, None, {AS_WRITTEN: 1.0, ONE: 3.0}),
    ):
        spent = {id(compiled): 0.9}
        result = choose_compiled.better(
            copy.copy(lanes),
            Trials(
                Backend(),
                Found("sin"),
                lambda _, compiled=compiled: compiled,
                lambda one, spent=spent: spent.get(id(one), 0.8),
            ),
        )
        assert result.how == lanes.how
        assert result.seconds[AS_WRITTEN] == 1.0
        assert FUSED in result.seconds


def test_why_nothing_is_compiled_is_told() -> None:
    lanes = _planned(TWO, TO_THE_BIT, {AS_WRITTEN: 1.0, TWO: 0.8})
    trials: Any = Trials(Backend("no compiler"), Found(), lambda _: lanes, lambda _: 1.0)
    assert choose_compiled.better(lanes, trials) is lanes
    assert lanes.notes == ["nothing is compiled: no compiler"]
    fast = mh.parallel(lambda x: x @ x, compile=True)
    fast(torch.rand(4, 4))
    assert "nothing is compiled: no two small operations follow each other" in fast.explain()


def test_a_compiler_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Any, metas: Any) -> Callable[..., Any]:
        return lambda *arguments: [torch.zeros_like(value) for value in module(*arguments)]

    monkeypatch.setattr(regions, "inductor", wrong)
    x = torch.rand(64, 64)

    def function(x: torch.Tensor) -> Any:
        return (x @ x).sin().cos() + 1

    fast = mh.parallel(function, compile=True)
    for _ in range(2):
        torch.testing.assert_close(fast(x), function(x))
    assert "times as far from exact results as plain execution" in fast.explain()
    assert "compiled regions: one lane is not used" in fast.explain()  # the uncompiled lane is right


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_ways_are_compared_with_numbers_that_tell_them_apart(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """A first call with zeros, or ones, would be equal in nearly any way."""

    def wrong(module: Any, metas: Any) -> Callable[..., Any]:
        return lambda *arguments: [torch.full_like(value, float(value.flatten()[0])) for value in module(*arguments)]

    monkeypatch.setattr(regions, "inductor", wrong)

    def function(x: torch.Tensor) -> Any:
        return (x @ x).sin().cos() + 1

    fast = mh.parallel(function, compile=True)
    before, first = torch.get_rng_state(), torch.full((64, 64), value)
    torch.testing.assert_close(fast(first), function(first))  # a lane may have another number of threads
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, torch.full((64, 64), value))
    x = torch.rand(64, 64)
    torch.testing.assert_close(fast(x), function(x))
    assert "times as far from exact results as plain execution" in fast.explain()


# torch.compile(model, backend="manyhands")


class Watching:
    """The backend without fusion, and all that it planned."""

    def __init__(self) -> None:
        self.made: list[Parallel] = []

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        return dynamo.compile_with(module, inputs, self._plan, writes_in_graph=True)

    def _plan(self, function: Callable[..., Any], reuse: bool) -> Any:
        self.made.append(Parallel(function, planning, reuse_outputs=reuse))
        return self.made[-1].planner()


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.branches = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) for _ in range(3))
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        parts = [branch(x).relu().mean((2, 3)) for branch in self.branches]
        return self.out(self.drop(parts[0] + parts[1] * parts[2]))


NETS = {"mlp": models.mlp, "branchy": Branchy}
X, Y = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def steps(net: nn.Module, call: Callable[..., Any], count: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(count):
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NETS)
def test_training_is_the_same(name: str) -> None:
    torch.manual_seed(0)
    plain, other = NETS[name](), NETS[name]()
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    watching = Watching()
    assert steps(other, torch.compile(other, backend=watching)) == pytest.approx(steps(plain, plain), rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-4, atol=1e-6)
    forward, backward = (value.planned for value in watching.made[:2])
    assert forward.schedule is not None, forward.notes
    assert backward.schedule is not None, backward.notes


def test_a_graph_that_is_retained_and_passes_in_any_order() -> None:
    torch.manual_seed(0)
    plain = Branchy().eval()
    other = copy.deepcopy(plain)
    for call in (plain, torch.compile(other, backend=Watching())):
        for _ in range(3):
            first, second = call(X).square().mean(), call(X + 1).abs().mean()
            second.backward(retain_graph=True)
            first.backward()
            second.backward()
    for parameter, same in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(same.grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_results_that_are_handed_on_take_only_the_operations_that_they_need() -> None:
    """They are computed operation by operation: a copy of the whole graph would run everything twice."""
    counted: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        own = dynamo._PlannedGraph(graph, lambda function, reuse: lambda arguments: None, dynamo._Places(), None)
        counted.extend(str(node.target) for node in own._make_views.graph.nodes if node.op == "call_function")
        return torch._functorch._aot_autograd.utils.make_boxed_func(graph)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=record)
    torch.compile(models.mlp(), backend=backend)(X)
    assert counted
    assert all("t.default" in name or "view" in name or "detach" in name for name in counted), counted


def test_inference_and_other_shapes() -> None:
    torch.manual_seed(0)
    net = models.lenet().eval()
    watching = Watching()
    fast = torch.compile(net, backend=watching)
    with torch.no_grad():
        for size in (4, 4, 3, 2, 3):
            torch.testing.assert_close(fast(X[:size]), net(X[:size]), rtol=1e-5, atol=1e-6)
    assert watching.made
    assert any(value._last is not None and value._last.schedule is not None for value in watching.made)


def test_what_a_graph_hands_on() -> None:
    """Results that are arguments, views of them, and arguments that share memory."""

    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a, a.t(), (a.t() @ b).sin(), b[1:], a.sum()

    base = torch.rand(4, 4)
    a, b = base, base[:, :4]
    fast = torch.compile(function, backend=Watching())
    for _ in range(3):
        for value, other in zip(fast(a, b), function(a, b), strict=True):
            assert torch.allclose(value, other)
    assert fast(a, b)[0].data_ptr() == a.data_ptr()


@needs_compiler
def test_by_its_name_with_fusion() -> None:
    dynamo.register(mh.compile_backend)
    dynamo.register(mh.compile_backend)  # twice is no matter
    assert "manyhands" in torch._dynamo.list_backends()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    fast = torch.compile(net, backend="manyhands")
    x = torch.rand(3, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"options": {"fuze": True}}, "no option fuze"),
        ({"options": {"fuse": 3}}, "give True or False"),
        ({"mode": "max-autotune"}, "Inductor's"),
    ],
)
def test_bad_options(given: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        dynamo.options_from(given)
    fast = torch.compile(nn.Linear(2, 2), backend=mh.compile_backend, **given)
    with pytest.raises(Exception, match=words):
        fast(torch.rand(1, 2))
