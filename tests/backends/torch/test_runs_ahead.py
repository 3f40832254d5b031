"""A run that harms nobody is started before guards are asked: its results count only if they agree."""

from __future__ import annotations

import torch
from torch import nn

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.parallel.plan import NOT_STARTED


def test_results_count_only_where_guards_agree() -> None:
    fast = mh.parallel(lambda x: x.sin() + x.cos(), synchronous=True)
    x = torch.rand(4)
    fast(x)
    agree, started, asked = True, list[object](), list[bool]()

    def ahead(tensors: object) -> object:
        started.append(tensors)
        return "ahead"

    def guards(arguments: object, keywords: object) -> bool:
        asked.append(len(started) > len(asked))
        return agree

    fast.planned.ahead, fast.planned.guards = ahead, guards
    assert fast(x) == "ahead"
    agree = False
    assert torch.equal(fast(x), x.sin() + x.cos())
    assert len(started) == 2
    assert asked[:2] == [True, True]  # after the run was started


def test_a_run_that_could_not_be_started_is_run() -> None:
    fast = mh.parallel(lambda x: x.sin() + x.cos(), synchronous=True)
    x = torch.rand(4)
    fast(x)
    fast.planned.ahead = lambda tensors: NOT_STARTED
    assert torch.equal(fast(x), x.sin() + x.cos())


def test_only_what_writes_draws_and_looks_up_nothing() -> None:
    def can(function: object, *given: torch.Tensor) -> bool:
        found = planning.trace(function, planning.call(given, {}))  # type: ignore[arg-type]
        for step in found.steps:  # as if it were on a GPU
            object.__setattr__(step.task, "device", "gpu:0")
        return planning.can_run_ahead(found)

    x = torch.rand(4, 4)
    weights, rows = torch.rand(8, 4), torch.arange(4)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    assert can(lambda x: (x @ x).relu(), x)
    assert can(net.eval(), x)
    assert not can(net.train(), x)  # statistics
    assert not can(lambda x: x.add_(1) @ x, x)
    assert not can(lambda x: nn.functional.dropout(x), x)
    assert not can(lambda rows: nn.functional.embedding(rows, weights), rows)
    assert not planning.can_run_ahead(planning.trace(lambda x: x @ x + 1, planning.call((x,), {})))  # on the CPU
