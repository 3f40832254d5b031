"""Graphs that aot_autograd has captured are described as they are: the same tasks as tracing them again gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import captured
from torch import nn

from manyhands.backends.torch.dynamo import graphs as tested
from manyhands.backends.torch.dynamo.graphs import CapturedGraph, trace_captured
from manyhands.schedule.graph import graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def described(found: Any) -> list[Any]:
    """What scheduling needs to know of a trace: memories have other numbers in each."""
    tasks = found.tasks
    return [
        (task.name, task.device, task.kind, task.token, task.detail, task.is_view, earlier)
        for task, earlier in zip(tasks, graph(tasks).needs, strict=True)
    ]


NETS = {
    "convolutions, statistics": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
    ),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "random numbers": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)),
}
BATCHES = {"convolutions, statistics": (2, 3, 8, 8), "attention": (2, 4, 8), "random numbers": (4, 8)}


@pytest.mark.parametrize("net", NETS)
def test_forward_and_backward_have_the_tasks_of_a_new_trace(net: str) -> None:
    graphs = captured(NETS[net]().train(), torch.rand(BATCHES[net]))
    assert len(graphs) == 2
    for function, tensors, _ in graphs:
        tensors = [tensor.detach() for tensor in tensors]
        direct, again = tested._as_captured(function, tensors), tested._traced_again(function, tensors)
        assert described(direct) == described(again)
        assert len(direct.outputs) == len(again.outputs)


def test_planning_traces_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (function, tensors, _), *_ = captured(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), torch.rand(2, 4)
    )
    monkeypatch.setattr(tested, "make_fx", lambda *_, **__: pytest.fail("it is traced again"))
    found = trace_captured(function, tensors)
    assert [task.name for task in found.tasks if not task.is_view] == ["addmm", "relu"]


def test_arguments_of_another_form_are_traced() -> None:
    """The forms that PyTorch predicts are not always those that it computes."""
    (function, tensors, _), *_ = captured(nn.Linear(4, 4).requires_grad_(False), torch.rand(2, 4))
    assert tested._as_captured(function, tensors) is not None
    for number, tensor in enumerate(tensors):
        for other in (tensor.double(), torch.cat([tensor, tensor]), tensor.flatten()[:1]):
            assert tested._as_captured(function, [*tensors[:number], other, *tensors[number + 1 :]]) is None
    assert tested._as_captured(function, tensors[:-1]) is None
    assert tested._as_captured(function, [*tensors, 3]) is None


def test_graphs_for_any_size_are_traced() -> None:
    graphs = captured(nn.Linear(4, 4).requires_grad_(False), *[torch.rand(2, 4), torch.rand(3, 4)] * 2, dynamic=True)
    assert graphs
    for function, arguments, _ in graphs:
        assert isinstance(function, CapturedGraph)
        assert tested._as_captured(function, arguments) is None
        sizes = {step.node.meta["val"].shape[0] for step in trace_captured(function, arguments).steps[-1:]}
        assert sizes <= {2, 3, 4}
