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


def test_after_some_runs_in_vain_guards_are_asked_first() -> None:
    """A function that is called in two states in turn would start a run for the wrong one at every second call."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).requires_grad_(False)
    fast = mh.parallel(net, synchronous=True)
    x, started = torch.rand(2, 4), list[object]()
    fast(x)
    fast(x)
    net.eval()
    fast(x)
    of_eval = fast.planned  # the newest: it is asked first
    of_eval.ahead = lambda tensors: started.append(tensors)
    net.train()
    for _ in range(10):
        assert torch.equal(fast(x), net(x))
    assert len(started) == 3
    assert of_eval.ahead is None
    net.eval()
    assert torch.equal(fast(x), net(x))
    assert fast.planned is of_eval


def test_not_while_tensors_are_elsewhere() -> None:
    net = nn.Linear(4, 4).requires_grad_(False)
    x = torch.rand(2, 4)
    trace = planning.trace(net, planning.call((x,), {}))
    for step in trace.steps:  # as if it were on a GPU
        object.__setattr__(step.task, "device", "gpu:0")
    are_there = planning.runs_ahead(trace)
    assert are_there is not None
    assert are_there()
    net.weight.data = net.weight.data.clone()
    assert not are_there()


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
        return planning.runs_ahead(found) is not None

    x = torch.rand(4, 4)
    weights, rows = torch.rand(8, 4), torch.arange(4)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    assert can(lambda x: (x @ x).relu(), x)
    assert can(net.eval(), x)
    assert not can(net.train(), x)  # statistics
    assert not can(lambda x: x.add_(1) @ x, x)
    assert not can(lambda x: nn.functional.dropout(x), x)
    assert not can(lambda rows: nn.functional.embedding(rows, weights), rows)
    assert planning.runs_ahead(planning.trace(lambda x: x @ x + 1, planning.call((x,), {}))) is None  # on the CPU
