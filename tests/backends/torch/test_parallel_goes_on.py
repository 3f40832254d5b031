"""Functions that go on from where they stand: planning tries them many times, but never beyond their data."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from manyhands.backends.torch import planning
from manyhands.parallel import trials
from manyhands.parallel.function import Parallel

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="virtual devices: tensors from outside are of the CPU"
)


class Reader:
    """The next row of some data at every call, as long as there are any."""

    def __init__(self) -> None:
        self.rows = torch.arange(12.0).reshape(3, 4)
        self.position = torch.zeros(1, dtype=torch.int64)

    def next(self) -> torch.Tensor:
        row = self.rows.index_select(0, self.position)
        self.position += 1
        return row.sin() + row.cos()


@pytest.mark.parametrize("compile", [False, True])
def test_a_function_is_not_tried_beyond_its_data(compile: bool) -> None:
    ours, theirs = Reader(), Reader()
    fast = Parallel(ours.next, compile=compile)
    for _ in range(3):
        assert torch.allclose(fast(), theirs.next(), rtol=1e-6)
        assert torch.equal(ours.position, theirs.position)
    with pytest.raises(IndexError, match="out of range"):
        fast()


def test_runs_that_lost_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold the memory of a CUDA graph."""
    runs: list[weakref.ref[Any]] = []
    made = planning.thread_run

    def noted(*arguments: Any) -> Any:
        run = made(*arguments)
        runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(planning, "thread_run", noted)
    monkeypatch.setattr(trials, "_CLEARLY", {True: 0.0})  # plain execution is kept
    fast = Parallel(lambda x: (x @ x).sin() + (x @ x.T).cos())
    fast(torch.rand(8, 8))
    gc.collect()
    assert runs
    assert [run() for run in runs] == [None] * len(runs)
