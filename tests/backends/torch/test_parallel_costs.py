"""Costs of operations: measured once, remembered, estimated where that cannot be."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from graph_cases import traced

from manyhands.backends.torch.run import costs as torch_costs


@pytest.mark.parametrize(("durations", "cost"), [([4e-3, 5e-6, 6e-6], 5e-6), ([0.2], 0.2)])
def test_a_call_that_was_interrupted_is_not_the_cost(
    durations: list[float], cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may take the processor for some milliseconds; a long operation is not repeated."""
    found = traced(lambda x: x + x, torch.randn(4))
    moments = [sum(durations[:number]) for number in range(len(durations) + 1)]
    clock = iter([moment for pair in itertools.pairwise(moments) for moment in pair])
    with monkeypatch.context() as patched:
        patched.setattr(torch_costs.time, "perf_counter", lambda: next(clock))
        measured = torch_costs.measure(found, 0, None)
    assert measured[0] == pytest.approx(cost)
    assert next(clock, None) is None


@pytest.mark.parametrize("what", [torch.backends.cuda.matmul, torch.backends.cudnn])
def test_tf32_is_another_cost(what: Any) -> None:
    """It changes which kernels run."""
    seen, before = [], what.allow_tf32
    for allowed in (not before, before):
        what.allow_tf32 = allowed
        seen.append(torch_costs.hardware(None))
    assert seen[0] != seen[1]


def test_what_writes_in_place_is_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a tensor from outside, to an argument, to a value of its own; on a GPU only views cost nothing."""
    total = torch.zeros(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y.mul_(2)
        total.add_(y)
        torch._foreach_mul_([total], 2)
        x.t().sub_(y[0])
        return torch.stack([y.t(), x])

    found = traced(function, torch.ones(4, 4))
    for step in found.steps:
        step.task = dataclasses.replace(step.task, device="gpu:0")
    monkeypatch.setattr(torch_costs, "_on_gpu", lambda step, device: (1.0, 1.0))
    costs: dict[Any, list[str]] = {}
    for number, step in enumerate(found.steps):
        cost = torch_costs.measure(found, number, (torch.device("cuda:0"),))
        costs.setdefault(cost, []).append(step.task.name)
    assert sorted(costs[0.0, 0.0]) == ["select", "t", "t"]
    assert {"mul_", "add_", "sub_", "_foreach_mul_"} <= set(costs[1.0, 1.0])
