"""``parallel`` as a decorator: bare, with options, and of methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@mh.parallel
def bare(x: torch.Tensor) -> torch.Tensor:
    """It multiplies."""
    return (x @ x).sin() + (x @ x.t()).cos()


@mh.parallel(memory=2.0, synchronous=True)
def with_options(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin() + (x @ x.t()).cos()


class Model(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), factor))

    @mh.parallel(synchronous=True)
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).detach()


class Plain:
    factor = 2.0

    @mh.parallel(synchronous=True)
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("fast", [bare, with_options], ids=["bare", "with options"])
def test_a_decorated_function_gives_what_it_gave(fast: Any) -> None:
    for _ in range(2):
        assert torch.equal(fast(X), fast.function(X))
    assert "traced" in fast.explain() or "tasks" in fast.explain()


def test_options_are_kept_and_so_are_name_and_text() -> None:
    assert (with_options.memory, with_options.synchronous) == (2.0, True)
    assert (bare.memory, bare.synchronous) == (1.3, False)
    assert (bare.__name__, bare.__doc__) == ("bare", "It multiplies.")


def test_methods_are_bound_to_their_objects() -> None:
    for make in (Model, Plain):
        one, other = (make(2.0), make(3.0)) if make is Model else (make(), make())
        if isinstance(other, Plain):
            other.factor = 3.0
        for _ in range(2):
            for model in (one, other):
                assert torch.equal(model.scaled(X), make.scaled.function(model, X))
        assert "synchronous" in make.scaled.explain()
    assert isinstance(other, Plain)
    other.factor = 4.0
    assert torch.equal(other.scaled(X), X * 4)


class NumberFormat(list[float]):
    """What it holds is held by C code."""


def test_objects_that_cannot_be_watched_are_run_as_they_are() -> None:
    fast, numbers = mh.parallel(lambda numbers, x: x * numbers[0], synchronous=True), NumberFormat([2.0])
    for numbers[0] in (2.0, 3.0):
        assert torch.equal(fast(numbers, X), X * numbers[0])


def test_the_same_call_without_a_function_opens_a_scope() -> None:
    with mh.parallel() as scope:
        total = mh.task(torch.add)(X, 1)
    assert torch.equal(total.result(), X + 1)
    assert scope(bare.function)(X).shape == X.shape
