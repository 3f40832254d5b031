"""Random programs on lanes: writes in place, views and random numbers, compared with eager to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from test_parallel_cpu import run_on, scheduled, traced

from manyhands.backends import torch_parallel, torch_threads
from manyhands.backends.torch_threads import ThreadRun
from manyhands.engine.check import check
from manyhands.engine.schedule import schedule, schedule_chains
from manyhands.errors import UnsafeSchedule
from manyhands.task import Task

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="virtual devices hold for one thread: lanes are not used with them"
)


def bits(tensor: torch.Tensor) -> list[int]:
    """Not a number is the same as itself, too."""
    found: list[int] = tensor.contiguous().view(torch.int32).flatten().tolist()
    return found


# Random programs

STEPS = st.lists(
    st.tuples(
        st.deferred(lambda: st.sampled_from(sorted(_WAYS))),
        st.integers(0, 50),
        st.integers(0, 50),
    ),
    min_size=1,
    max_size=14,
)
_WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mm": lambda a, b: a @ b,
    "sin_": lambda a, b: a.sin_(),
    "add_": lambda a, b: a.add_(b.clone()),  # b may be a view of a
    "view": lambda a, b: a.t(),
    "row": lambda a, b: a[1].expand(3, 3),
    "row_": lambda a, b: a.fill_diagonal_(0.5) if a.is_contiguous() else a + 1,
    "rand": lambda a, b: torch.rand_like(a) + b,
    "dropout": lambda a, b: torch.nn.functional.dropout(a, 0.5),
    "split": lambda a, b: torch.cat(a.split([1, 2])[::-1]),
    "copy_": lambda a, b: a.copy_(b.clone()) if a.is_contiguous() else a * b,
    "diagonal_": lambda a, b: a.diagonal().mul_(0.5).expand(3, 3),  # a write through a view, the view goes on
    "rows": lambda a, b: torch.stack(a.unbind(0)) + b,
    "index_": lambda a, b: a.index_fill_(0, torch.tensor([1]), 0.25) if a.is_contiguous() else a - b,
    "normal_": lambda a, b: a.normal_() if a.is_contiguous() else a + b,  # random numbers, in place
    "uniform": lambda a, b: torch.nn.functional.dropout1d(b, 0.5) + torch.randn(3, 3),
    "view_": lambda a, b: a.view(-1)[2:5].zero_().expand(3, 3) if a.is_contiguous() else a.exp(),
    "topk": lambda a, b: a.sort(dim=1).values * b.max(dim=0).values,
}


def program(steps: list[tuple[str, int, int]]) -> Callable[..., Any]:
    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for way, one, other in steps:
            a, b = values[one % len(values)], values[other % len(values)]
            if way.endswith("_") and 0 in a.stride():
                a = a.clone()
            values.append(_WAYS[way](a, b))
        return [value * 1 for value in values[len(inputs) :]]

    return function


@given(
    STEPS, st.integers(1, 3), st.randoms(use_true_random=False), st.sampled_from([schedule, schedule_chains]), st.data()
)
@settings(max_examples=int(os.environ.get("MANYHANDS_EXAMPLES", "60")), deadline=None)
def test_random_programs_equal_eager_to_the_bit(
    steps: list[tuple[str, int, int]], lanes: int, chance: Any, way: Any, data: st.DataObject
) -> None:
    """Writes in place, views and random numbers, on lanes chosen by random costs; arguments written to as well."""
    function = program(steps)
    torch.manual_seed(0)
    inputs = [torch.randn(3, 3) for _ in range(3)]
    plain, own = [x.clone() for x in inputs], [x.clone() for x in inputs]
    torch.manual_seed(1)
    expected = function(*plain)
    state = torch.get_rng_state()
    found, _ = traced(function, *inputs)
    tasks = [
        Task(t.name, t.reads, t.writes, t.device, t.kind, chance.random(), 1.0, t.token)
        for t in torch_threads.tasks(found)
    ]
    made = scheduled(found, lanes, tasks, way)
    if every := [(task, other) for task, others in made.waits.items() for other in others]:
        task, other = data.draw(st.sampled_from(every))
        left = tuple(one for one in made.waits[task] if one != other)
        with pytest.raises(UnsafeSchedule):  # not one of them can be left out
            check(replace(made, waits={**made.waits, task: left}))
    run = ThreadRun(found, torch_parallel.plan_of(made), lanes)
    for _ in range(2):  # gates are closed again after a run
        for mine, first in zip(own, inputs, strict=True):
            mine.copy_(first)
        torch.manual_seed(1)
        results = run.replay(own)
        assert [bits(one) for one in results] == [bits(one) for one in expected]
        assert [bits(one) for one in own] == [bits(one) for one in plain]
        assert torch.equal(torch.get_rng_state(), state)


def test_lanes_are_in_inference_mode_where_the_caller_is() -> None:
    def function(x: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(4):
            sums.add_(x.sin())
        return x @ x, x.cos() + sums, x.exp().mul_(2)

    with torch.inference_mode():
        x, sums, own = torch.ones(3, 3), torch.zeros(3, 3), torch.zeros(3, 3)
        expected = function(x, sums)
        for lanes in (2, 3):
            run = run_on(function, lanes, x, own.zero_())
            for one, other in zip(run.replay([x, own]), expected, strict=True):
                assert torch.equal(one, other)
                assert one.is_inference()
