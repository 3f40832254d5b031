"""Planning leaves nothing behind: what a function writes while it is traced is made-up, and nobody gets to see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.backends import torch_parallel
from manyhands.engine.parallel import Parallel

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def planned(function: Callable[..., Any]) -> Parallel:
    """With the traced code always used where there is one, in the caller's thread."""
    return Parallel(function, torch_parallel, synchronous=True)


# Tensors that get other memory


def assigns(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weight.data = weight.data * 0.5 + x.sum(0)
    return x * weight.data


def subtracts(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weight.data -= x.sum(0)  # assigns, too
    return x * weight.data


def sets(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight.set_(x.sum(0))
    return x * weight.detach()


@pytest.mark.parametrize("way", [assigns, subtracts, sets])
def test_a_weight_that_gets_other_memory_keeps_its_numbers(way: Callable[..., Any]) -> None:
    own, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    fast = planned(lambda x: way(own, x))
    for number in range(3):
        assert torch.equal(fast(X + number), way(plain, X + number))
        assert torch.equal(own, plain)
    assert "copy_" in fast.explain()


def test_an_argument_that_gets_other_memory_has_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.data = x * 2
        return x + 1

    fast = planned(function)
    for _ in range(2):
        x = X.clone()
        assert torch.equal(fast(x), X * 2 + 1)
        assert torch.equal(x, X * 2)


def test_a_layer_without_a_form_is_planned_when_it_has_one() -> None:
    layer = nn.LazyLinear(3)
    fast = planned(torch.no_grad()(lambda x: layer(x)))
    for _ in range(3):
        assert torch.equal(fast(X), layer(X))
    assert "synchronous" in fast.explain()
