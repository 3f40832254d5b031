"""``parallel(fn, compile=True)`` and ``torch.compile(model, backend="manyhands")``: lanes on top of a compiler."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.backends.torch import passes
from manyhands.backends.torch.dynamo import backend as dynamo
from manyhands.book import torch as models
from manyhands.parallel.graphs import Graphs
from manyhands.parallel.plan import Plan
from manyhands.parallel.planner import PlanOptions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# parallel(fn, compile=True)


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


# torch.compile(model, backend="manyhands")


class Watching:
    """The backend without fusion, and all that it planned."""

    def __init__(self) -> None:
        self.graphs = Graphs(PlanOptions(), "a graph")

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        return dynamo.compile_with(module, inputs, functools.partial(self.graphs.make, None))

    def plans(self) -> list[Plan]:
        return [plan for _, plan in self.graphs.plans_of([None])]


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


def test_training_is_the_same() -> None:
    torch.manual_seed(0)
    plain, other = Branchy(), Branchy()
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    watching = Watching()
    assert steps(other, torch.compile(other, backend=watching)) == pytest.approx(steps(plain, plain), rel=1e-5)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-4, atol=1e-6)
    forward, backward = watching.plans()[:2]
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
        own = dynamo._PlannedGraph(graph, lambda role: lambda graph, arguments: None, dynamo._SteadyAddresses(), None)
        counted.extend(str(node.target) for node in own._make_views.graph.nodes if node.op == "call_function")
        return torch._functorch._aot_autograd.utils.make_boxed_func(graph)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=record)
    torch.compile(models.mlp(), backend=backend)(X)
    assert counted
    assert all("t.default" in name or "view" in name or "detach" in name for name in counted), counted


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


def test_by_its_name() -> None:
    assert "manyhands" in torch._dynamo.list_backends()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    fast = torch.compile(net, backend="manyhands", options={"fuse": False})
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
    fast = torch.compile(nn.Linear(2, 2), backend=mh.compile_backend, **given)
    with pytest.raises(Exception, match=words):
        fast(torch.rand(1, 2))
