"""Calls that never come again are not planned for ever; those that do come again are."""

from __future__ import annotations

import torch

from manyhands.backends.torch import planning
from manyhands.parallel.function import Parallel

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def counted() -> tuple[Parallel, list[int]]:
    """A function, and for each time that it was looked into (a trace runs it) an entry."""
    looked: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            if name == "trace":
                looked.append(1)
            return getattr(planning, name)

    return Parallel(lambda x, number: x * number, Counting(), synchronous=True), looked


def test_a_number_that_is_new_at_every_call_ends_planning() -> None:
    fast, looked = counted()
    for number in range(40):
        assert torch.equal(fast(X, number), X * number)
    assert len(looked) < 20
    assert "Pass a number that changes as a tensor" in fast.explain()
    for _ in range(3):  # and one that comes again is planned
        assert torch.equal(fast(X, 77), X * 77)
    assert "synchronous" in fast.explain()


def test_shapes_that_come_again_are_planned_however_many_there_are() -> None:
    fast, looked = counted()
    for _ in range(4):
        for size in range(1, 7):
            assert torch.equal(fast(X[:size], 2), X[:size] * 2)
    assert len(looked) == 4


def test_what_is_called_often_stays_planned_beside_what_never_comes_again() -> None:
    fast, looked = counted()
    for number in range(30):
        for _ in range(2):
            assert torch.equal(fast(X, -1), -X)
        fast(X, number)
    before = len(looked)
    fast(X, -1)
    assert len(looked) == before
    assert "synchronous" in fast.explain()
    assert before < 20
