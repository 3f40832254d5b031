"""``loss.backward(); optimizer.step(); return loss``: planned, and given back as PyTorch gives it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh

needs_outside_tensors = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="on virtual devices tensors come as arguments"
)
X, Y = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def planned(function: Callable[..., Any]) -> Any:
    return mh.parallel(function, synchronous=True)


def step_of(net: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@needs_outside_tensors
def test_a_step_that_returns_its_loss_is_planned() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    other = copy.deepcopy(plain)
    step, fast = step_of(plain), planned(step_of(other))
    kept = []
    for _ in range(4):
        expected, loss = step(X, Y), fast(X, Y)
        assert torch.equal(loss, expected)
        assert (loss.requires_grad, loss.is_leaf) == (True, False)
        for result in (expected, loss):
            with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
                result.backward()
        kept.append(loss)
        loss /= 2  # in place, as where gradients are accumulated
    assert "synchronous" in fast.explain()
    assert len({loss.data_ptr() for loss in kept}) == 4
    for one, same in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


def gradient_of(x: torch.Tensor, w: torch.Tensor) -> Any:
    w = w.detach().requires_grad_()
    loss = (x @ w).square().mean()
    (gradient,) = torch.autograd.grad(loss, [w])
    return {"loss": loss, "gradients": [gradient], "half": loss / 2}


def test_in_a_tree_of_results_and_what_is_computed_from_it() -> None:
    w = torch.rand(8, 3)
    device = mh.try_gpu()
    x, w = mh.to(X, device), mh.to(w, device)
    fast = planned(gradient_of)
    for _ in range(2):
        expected, ours = gradient_of(x, w), fast(x, w)
        assert list(ours) == list(expected)
        for name in ("loss", "half"):
            assert torch.equal(ours[name].detach(), expected[name].detach())
            assert ours[name].requires_grad
            with pytest.raises(RuntimeError, match="second time"):
                ours[name].backward()
        assert not ours["gradients"][0].requires_grad
    assert "synchronous" in fast.explain()
    assert type(ours["loss"].grad_fn).__name__ == "_RefusesBackward"  # of a replay, not of plain execution


def test_a_graph_that_can_still_be_used_is_used_later() -> None:
    w = torch.rand(8, 3, requires_grad=True)

    def retained(x: torch.Tensor) -> torch.Tensor:
        loss = (x @ w).square().mean()
        torch.autograd.grad(loss, [w], retain_graph=True)
        return loss

    fast = planned(retained)
    for _ in range(2):
        w.grad = None
        fast(X).backward()
        found, w.grad = w.grad, None
        retained(X).backward()
        assert torch.equal(found, w.grad)
    assert "cannot be traced: a result carries gradients" in fast.explain()
