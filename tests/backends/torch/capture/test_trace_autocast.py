"""Autocast casts a weight once, however often it is used: so does a plan, or its gradients would round elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.parallel.function import Parallel

Scope = Callable[[], AbstractContextManager[Any]]


def autocast(**options: Any) -> Scope:
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)


class Repeated(nn.Module):
    """One layer, used three times."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope
        self.layer = nn.Linear(16, 16)

    def step(self, x: torch.Tensor) -> list[torch.Tensor]:
        with self.scope():
            for _ in range(3):
                x = self.layer(x).relu()
        return [*torch.autograd.grad(x.float().square().mean(), list(self.parameters()))]


def planned(net: Repeated) -> Parallel:
    """The traced code is always used, in the caller's thread."""
    return Parallel(net.step, pure=True, synchronous=True)


@pytest.mark.parametrize(
    ("around", "inside"),
    [
        (nullcontext, autocast()),
        (autocast(), nullcontext),
        (autocast(), autocast()),
        (autocast(cache_enabled=False),) * 2,
    ],
    ids=["inside", "around", "both", "without a memory"],
)
def test_gradients_are_those_of_plain_execution(around: Scope, inside: Scope) -> None:
    torch.manual_seed(0)
    net, x = Repeated(inside), torch.randn(8, 16)
    fast = planned(net)
    with around():
        assert all(map(torch.equal, fast(x), net.step(x)))
        assert "synchronous" in fast.explain()
    if around is nullcontext:  # autocast, too, forgets what is cast when its outermost scope ends
        with torch.no_grad():
            net.layer.weight.mul_(2)
        assert all(map(torch.equal, fast(x), net.step(x)))


def test_tracing_leaves_no_cast_behind() -> None:
    """What was cast while tracing is made up."""
    net, x = Repeated(nullcontext), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        planned(net)(x)
        assert torch.is_autocast_cache_enabled()
        assert type(net.layer(x)) is torch.Tensor
        assert net.layer(x).detach().isfinite().all()
