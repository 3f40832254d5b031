"""Training steps as people write them, captured up to the optimizer: losses, weights and gradients of plain execution.

Backward passes are part of a captured graph, ``zero_grad()`` is traced, and a loss outlives its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Step = Callable[[torch.Tensor, torch.Tensor], Any]
loss_of = nn.functional.cross_entropy


def in_the_books_order(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        output = net(x)
        losses = loss_of(output, y, reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        return losses.sum(), (output.argmax(1) == y).sum()

    return step


def accumulated_and_clipped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=False)
        for start in range(2):
            loss = loss_of(net(x[start::2]), y[start::2]) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return loss

    return step


def retained(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        output = net(x)
        loss = loss_of(output, y)
        loss.backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()
        return loss, output

    return step


def with_the_last_gradients(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """In PyTorch's order, behind a look at the gradients of the step before."""

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        norms = [parameter.grad.norm() for parameter in net.parameters() if parameter.grad is not None]
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        return loss, *norms

    return step


PROGRAMS = [
    in_the_books_order,
    accumulated_and_clipped,
    retained,
    with_the_last_gradients,
]


def run(make: Callable[..., Step], wrap: Callable[[Step], Step]) -> list[Any]:
    """All that a few steps leave behind; at last the error of a second backward pass through the loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    step, seen = wrap(make(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))), list[Any]()
    for number in range(3):
        torch.manual_seed(number)
        results = step(torch.randn(8, 4), torch.randint(3, (8,)))
        results = list(results) if isinstance(results, tuple) else [results]
        seen += [value.detach().clone() for value in results] + [value.requires_grad for value in results]
        seen += [value.clone() for value in net.state_dict().values()]
        seen += [None if value.grad is None else value.grad.clone() for value in net.parameters()]
    try:
        results[0].backward()
    except RuntimeError as error:
        seen.append(" ".join(str(error).split()[:8]))
    return seen


@pytest.mark.parametrize("make", PROGRAMS)
def test_steps_leave_what_plain_execution_leaves(make: Callable[..., Step]) -> None:
    plain = run(make, lambda step: step)
    captured = run(make, lambda step: mh.parallel(step, synchronous=True))  # every call by its graphs
    assert len(captured) == len(plain)
    for value, expected in zip(captured, plain, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(value, expected)
        else:  # whether a result requires a gradient, None, the words of an error
            assert value == expected


def test_the_options_of_an_optimizer_stay_as_they_are() -> None:
    """Dynamo would make Adam ``capturable``, for a capture of its update."""
    optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)])

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + float(optimizer.param_groups[0]["capturable"])

    assert mh.parallel(function, synchronous=True)(torch.zeros(2)).tolist() == [0, 0]
    assert optimizer.param_groups[0]["capturable"] is False
