"""``torch.compile(model, backend="manyhands")``: its options, what is bound to arguments, and what is handed on."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from graph_cases import captured, traced
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from manyhands import torch as mh
from manyhands.backends.torch import passes, planning
from manyhands.backends.torch.dynamo import backend as dynamo
from manyhands.backends.torch.dynamo.backend import GraphPlan, GraphRole
from manyhands.parallel.graphs import Graphs
from manyhands.parallel.planner import PlanOptions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLAN = GraphPlan(lambda tensors: [], in_graph=False)


def test_the_name_alone_is_enough() -> None:
    """PyTorch loads the backend by its entry point, which needs no other import of manyhands."""
    (entry,) = entry_points(group="torch_dynamo_backends", name="manyhands")
    assert entry.load() is mh.compile_backend


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"options": {"fuze": True}}, "no option fuze"),
        ({"options": {"fuse": 3}}, "give True or False"),
        ({"mode": "max-autotune"}, "Inductor's"),
    ],
)
def test_bad_options(given: dict[str, Any], words: str) -> None:
    fast = torch.compile(nn.Linear(2, 2), backend=mh.compile_backend, **given)
    with pytest.raises(Exception, match=words):
        fast(torch.rand(1, 2))


def test_a_compiler_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Any, metas: Any) -> Callable[..., Any]:
        return lambda *arguments: [torch.zeros_like(value) for value in module(*arguments)]

    monkeypatch.setattr(passes, "inductor", wrong)
    x = torch.rand(64, 64)

    def function(x: torch.Tensor) -> Any:
        return (x @ x).sin().cos() + 1

    fast = mh.parallel(function, compile=True)
    for _ in range(2):
        torch.testing.assert_close(fast(x), function(x))
    assert "whole graph is not used: its results differ by" in fast.explain()


@pytest.mark.skipif(not hasattr(torch.compiler, "_compile_session_context"), reason="PyTorch refuses such calls")
def test_threads_capture_and_plan_at_once() -> None:
    def train(factor: int) -> list[float]:
        fast = torch.compile(lambda x: (x @ x.t()).sum() * factor, backend=backend, dynamic=True)
        return [fast(torch.ones(rows, 2)).item() for rows in (2, 2, 2, 3, 3, 3)]  # each size is planned

    backend = functools.partial(mh.compile_backend, options={"fuse": False})
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(train, range(12))] == [[8.0 * factor] * 3 + [18.0 * factor] * 3 for factor in range(12)]


# Bindings


def test_what_a_graph_hands_on() -> None:
    """Results that are arguments, views of them, and arguments that share memory."""

    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a, a.t(), (a.t() @ b).sin(), b[1:], a.sum()

    base = torch.rand(4, 4)
    a, b = base, base[:, :4]
    fast = torch.compile(function, backend="manyhands", options={"fuse": False})
    for _ in range(3):
        for value, other in zip(fast(a, b), function(a, b), strict=True):
            assert torch.allclose(value, other)
    assert fast(a, b)[0].data_ptr() == a.data_ptr()


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag])
def test_gradients_may_be_lazily_conjugated_or_negated(view: Callable[..., Any]) -> None:
    x = torch.randn(4, 4, dtype=torch.complex64)
    given = view(torch.randn(4, 4, dtype=torch.complex64))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin() if given.is_complex() else (x @ x).real.sin()

    fast = torch.compile(function, backend="manyhands", options={"fuse": False})
    for number in range(4):
        results = []
        for called in (fast, function):
            leaf = x.clone().requires_grad_()
            called(leaf).backward(given if number % 2 else given.resolve_conj().resolve_neg())
            results.append(leaf.grad)
        torch.testing.assert_close(*results)


# When graphs are planned


def test_the_backward_graph_is_planned_once_and_after_the_forward_graph() -> None:
    """The first call of a forward graph is PyTorch's to watch: what it keeps lies elsewhere from the second on."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    planned = [place for *_, place in captured(net, torch.rand(8, 4), calls=4, planned=True)]
    (number, _), *_ = planned
    assert planned == [(number, False), (number, True)]


# Results that cannot be compared


@torch.library.custom_op(
    "manyhands_tests::attention",
    mutates_args=(),
    schema="(Tensor x, float dropout_p=0.) -> (Tensor output, Tensor philox_seed)",
)
def _attention(x: torch.Tensor, dropout_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention on a GPU does, it gives a state that nobody has written to."""
    return x.sin(), torch.tensor(next(_SEEDS))


@_attention.register_fake
def _(x: torch.Tensor, dropout_p: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty((), dtype=torch.long)


_SEEDS = itertools.count()


@pytest.mark.parametrize(("dropout", "is_same"), [(0.0, True), (0.5, False)])
def test_the_random_state_of_attention_without_dropout_is_not_compared(dropout: float, is_same: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        result, state = torch.ops.manyhands_tests.attention(x, dropout)
        return result * 2, state.detach()

    x = torch.rand(4)
    trace = traced(function, x)
    one, other = (planning.results_of(trace, [x], planning.as_written(trace)) for _ in range(2))
    assert planning.equal(one, other)[0] is is_same


def test_how_a_graph_is_run_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(lambda x: (x @ x).sin(), backend=mh.compile_backend, options={"fuse": False})
    with caplog.at_level("DEBUG", "manyhands"):
        for _ in range(3):
            fast(torch.rand(4, 4))
    told = [record.getMessage() for record in caplog.records if record.name == "manyhands"]
    assert len(told) == 1
    line = test_how_a_graph_is_run_is_logged.__code__.co_firstlineno + 1
    assert f"test_compile_backend.py:{line}: run as" in told[0], "the user's line"
    assert "why not faster" in told[0]


# What a model writes to its buffers


class Net(nn.Module):
    """Running averages, a counter, and a buffer that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.norm(self.first(x)).sin() * self.calls.clone()


def train(call: Callable[..., Any], x: torch.Tensor) -> Any:
    result = call(x)
    result.square().mean().backward()
    return result


def train_with_a_retained_graph(call: Callable[..., Any], x: torch.Tensor) -> Any:
    result = call(x)
    loss = result.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return result


def two_forwards_then_two_backwards(call: Callable[..., Any], x: torch.Tensor) -> Any:
    first, second = call(x), call(x + 1)
    first.square().mean().backward()
    second.abs().mean().backward()
    return second


def infer(call: Callable[..., Any], x: torch.Tensor) -> Any:
    with torch.no_grad():
        return call(x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("program", [train, train_with_a_retained_graph, two_forwards_then_two_backwards, infer])
def test_buffers_are_written_once(program: Callable[..., Any], training: bool) -> None:
    torch.manual_seed(0)
    plain = Net().train(training)
    other = copy.deepcopy(plain)
    counted = Counting()
    fast = torch.compile(other, backend=counted)
    for number in range(4):
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(number))
        versions = [buffer._version for buffer in other.buffers()]
        torch.testing.assert_close(program(fast, x), program(plain, x), rtol=1e-4, atol=1e-5)
        for (name, one), same, version in zip(plain.named_buffers(), other.buffers(), versions, strict=True):
            torch.testing.assert_close(same, one, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
            assert (same._version > version) == (training or name == "calls"), name
    for one, same in zip(plain.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (same.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(same.grad, one.grad, rtol=1e-4, atol=1e-5)
    assert counted.writes  # by operations of the graph, not by copies behind it


class Counting:
    """The backend without fusion, whose plans are always used; counts the writes in its forward graph."""

    def __init__(self) -> None:
        self.writes = 0
        self._graphs = Graphs(PlanOptions(synchronous=True), "a graph")

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        return dynamo.compile_with(module, inputs, self._make)

    def _make(self, role: GraphRole) -> Any:
        inner = self._graphs.make(None, role)

        def plan(graph: Any, arguments: Any) -> Any:
            self.writes += sum(written(node) for node in graph.graph.nodes)
            return inner(graph, arguments)

        return plan


def written(node: Any) -> bool:
    """Whether an operation writes to its arguments."""
    return node.op == "call_function" and bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def test_a_graph_that_only_writes_is_planned() -> None:
    counted = Counting()

    @functools.partial(torch.compile, backend=counted)
    def average(into: torch.Tensor, value: torch.Tensor) -> None:
        into.mul_(0.5).add_(value.sin() * 0.5)

    one = torch.rand(4)
    other = one.clone()
    for number in range(3):
        value = torch.full((4,), float(number))
        average(one, value)
        other.mul_(0.5).add_(value.sin() * 0.5)
        torch.testing.assert_close(one, other)
    assert counted.writes


def test_buffers_that_change_places() -> None:
    def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        before = a.clone()
        a.copy_(b)
        b.copy_(before)
        return a.sin()

    counted = Counting()
    fast = torch.compile(swap, backend=counted)
    for _ in range(3):
        a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        torch.testing.assert_close(fast(a, b), torch.tensor([3.0, 4.0]).sin())
        assert a.tolist() == [3.0, 4.0]
        assert b.tolist() == [1.0, 2.0]


def test_dropout_before_a_transposition_is_trained() -> None:
    """The gradient of a dropout has strides, which a view after it depends on."""
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dropped = nn.functional.dropout((x @ weight).view(2, 3, 4), 0.5, training=True)
        return (dropped.transpose(1, 2) * torch.arange(1.0, 4.0)).sum(), dropped.detach()

    compiled = torch.compile(function, backend="manyhands", options={"fuse": False})
    for _ in range(3):
        loss, dropped = compiled(x)
        (gradient,) = torch.autograd.grad(loss, weight)
        kept = (dropped != 0) * 2.0 * torch.arange(1.0, 4.0)[:, None]
        torch.testing.assert_close(gradient, x.t() @ kept.view(6, 4))


def _graph_with(first: GraphPlan) -> Any:
    module = make_fx(lambda x: (x.sin(),))(torch.rand(4))
    return dynamo._PlannedGraph(module, lambda role: lambda graph, arguments: first, dynamo._SteadyAddresses(), None)


def test_a_better_plan_is_looked_for_once_when_it_is_due() -> None:
    x, asked = torch.rand(4), list[str]()

    def give(name: str) -> Any:
        return lambda tensors: [asked.append(name), tensors[0].sin()][1:]

    def better(graph: Any, arguments: tuple[Any, ...]) -> GraphPlan:
        asked.append("looked for")
        return GraphPlan(give("better"), in_graph=False)

    graph = _graph_with(GraphPlan(give("first"), in_graph=False, later=(3, better)))
    for number in range(5):
        torch.testing.assert_close(graph(x + number), [(x + number).sin()])
    assert asked == ["first", "first", "looked for", "better", "better", "better"]


def test_what_a_plan_reads_in_place_stays_when_a_better_one_is_looked_for() -> None:
    """The better plan may be the same run, which has the addresses of these arguments."""
    x, asked = torch.rand(4), list[type]()

    def better(graph: Any, arguments: tuple[Any, ...]) -> GraphPlan:
        asked.extend(map(type, arguments))
        return PLAN

    graph = _graph_with(PLAN)
    first = dynamo._Bound(GraphPlan(lambda tensors: [], in_graph=True, later=(2, better)), (x,), [0], None)
    second = graph._bind((x,), None, instead_of=first)
    assert asked == [nn.Parameter]  # a run reads parameters in place
    assert second.fits((x,), None)
    assert not second.fits((x.clone(),), None)


def test_the_graph_runs_as_it_is_where_the_better_plan_is_none() -> None:
    x = torch.rand(4)
    other = torch.zeros(4)
    graph = _graph_with(GraphPlan(lambda tensors: [other], in_graph=False, later=(2, lambda graph, arguments: None)))
    assert graph(x)[0] is other
    for _ in range(2):
        assert torch.equal(graph(x)[0], x.sin())
