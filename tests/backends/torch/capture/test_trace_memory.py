"""Which tensors share memory: what schemas and storages do not say, results of one operation, arrays of NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import planned, scheduled, traced
from schedule_cases import needed_before
from torch import nn
from torch.fx import Interpreter, Node
from torch.utils._pytree import tree_leaves

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.compat import reach
from manyhands.backends.torch.run.bindings import native
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import schedule, schedule_main_lane

# What is really so


class Observer(Interpreter):
    """Runs a trace, and compares who really shares memory with what the trace says."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.module)
        self._found = trace
        self.unknown: set[str] = set()

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = native(n)(*args, **kwargs) if hasattr(n.target, "_schema") else n.target(*args, **kwargs)  # type: ignore[operator]
        arguments = {node: tree_leaves(self.env[node]) for node in n.all_input_nodes}
        for tensor in _tensors(result):
            for one, values in arguments.items():
                if any(_share(tensor, other) for other in _tensors(values)):
                    self._must_be_known(n, self._found.storages[n] & self._found.storages[one])
        for one, other in itertools.combinations(_tensors(result), 2):
            if _share(one, other) and _overlap(one, other):
                self._must_be_known(n, _views(n))
        return result

    def _must_be_known(self, node: Node, known: Any) -> None:
        if not known:
            self.unknown.add(str(node.target))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _views(node: Node) -> bool:
    return len({value.untyped_storage()._cdata for value in _tensors(node.meta["val"])}) == 1


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.untyped_storage(), other.untyped_storage()
    return bool(first.nbytes()) and first.data_ptr() == second.data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, first = one.data_ptr(), other.data_ptr()
    behind, end = (value.data_ptr() + reach(value) * value.element_size() for value in (one, other))
    return start < end and first < behind


def attention(kind: torch.dtype) -> Callable[..., Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, dtype=kind) for _ in range(2)]

    def function(x: torch.Tensor) -> Any:
        q, k = (layer(x) for layer in layers)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ k
        return torch.autograd.grad(y.float().square().mean(), [p for layer in layers for p in layer.parameters()])

    return function


def of_module(module: nn.Module) -> Callable[..., Any]:
    def function(x: torch.Tensor) -> Any:
        loss = sum(tensor.float().square().mean() for tensor in _tensors(module(x)))
        return torch.autograd.grad(loss, list(module.parameters()))  # type: ignore[arg-type]

    return function


PROGRAMS: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[int, ...], torch.dtype]] = {
    "attention": (lambda: attention(torch.float32), (2, 3, 5, 16), torch.float32),
    "attention, bf16": (lambda: attention(torch.bfloat16), (2, 3, 5, 16), torch.bfloat16),
    "LSTM": (lambda: of_module(nn.LSTM(8, 5, num_layers=2)), (4, 3, 8), torch.float32),
    "GRU": (lambda: of_module(nn.GRU(8, 5)), (4, 3, 8), torch.float32),
    "GRU cell": (lambda: of_module(nn.GRUCell(8, 5)), (4, 8), torch.float32),
    "transformer": (
        lambda: of_module(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)),
        (4, 3, 8),
        torch.float32,
    ),
    "images": (
        lambda: of_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))),
        (2, 3, 8, 8),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trace_knows_all_that_really_shares_memory(name: str) -> None:
    make, shape, kind = PROGRAMS[name]
    x = torch.randn(shape).to(kind)
    trace = traced(make(), x)
    observer = Observer(trace)
    with torch.no_grad():
        observer.run(x)
    assert not observer.unknown


# Views that do not say so


@pytest.mark.parametrize("way", [schedule, schedule_main_lane])
@pytest.mark.parametrize("name", ["attention, bf16", "GRU cell"])
def test_who_takes_a_value_comes_after_who_makes_it(name: str, way: Any) -> None:
    """Also where values are known by their memory alone, as on a GPU: in every order that the checker lets pass."""
    make, shape, kind = PROGRAMS[name]
    trace = traced(make(), torch.randn(shape).to(kind))
    assert any(step.task.name.startswith(("_unsafe", "unsafe")) for step in trace.steps)
    program = graph(trace.tasks)
    before = needed_before(program)
    made_by = {node: number for number, step in enumerate(trace.steps) for node in step.nodes}
    for number, step in enumerate(trace.steps):
        makers = {made_by[value] for node in step.nodes for value in node.all_input_nodes if value in made_by} - {
            number
        }
        assert makers <= before[number]
    for lanes in (2, 3):
        place = {task: number for number, task in enumerate(scheduled(trace, lanes, trace.tasks, way).order)}
        assert all(place[other] < place[number] for number, others in enumerate(before) for other in others)


# Results of one operation


def test_both_bias_gradients_of_an_lstm_have_their_own_memory() -> None:
    layer = nn.LSTM(8, 5, num_layers=2)

    def gradients(x: torch.Tensor) -> Any:
        return torch.autograd.grad(layer(x)[0].square().mean(), list(layer.parameters()))

    def backward(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        loss = layer(x)[0].square().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(4, 3, 8)
    fast = planned(gradients)
    results, expected = fast(x), gradients(x)
    assert "synchronous" in fast.explain()
    assert not planning.shared_memory(results)
    for result, other in zip(results, expected, strict=True):
        result.mul_(0.5)  # as clipping does
        other.mul_(0.5)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other)
    planned(backward)(x)
    assert not planning.shared_memory([parameter.grad for parameter in layer.parameters()])
