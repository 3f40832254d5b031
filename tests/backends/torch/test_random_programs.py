"""Random programs on lanes, compared with eager to the bit: writes in place, views, random numbers; and what operations
do beside their results: checks that fail, views that do not say so, gradients in one memory, arrays seen twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from graph_cases import run_on, scheduled, traced
from hypothesis import given, settings
from schedule_cases import no_wait_can_be_taken_away
from support import examples

from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.run import threads
from manyhands.backends.torch.run.threads import ThreadRun, operation_threads
from manyhands.schedule.lanes import Schedule, schedule, schedule_chains


def bits(tensor: torch.Tensor) -> list[int]:
    """Not a number is the same as itself, too."""
    result: list[int] = tensor.contiguous().view(torch.int32).flatten().tolist()
    return result


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
    def function(*inputs: torch.Tensor) -> list[Any]:
        values = list(inputs)
        for way, one, other in steps:
            a, b = values[one % len(values)], values[other % len(values)]
            if way.endswith("_") and 0 in a.stride():
                a = a.clone()
            values.append({**_WAYS, **_ODD}[way](a, b))
        return [value * 1 for value in values[len(inputs) :]]

    return function


def outcome(run: Callable[..., Any], inputs: list[torch.Tensor]) -> Any:
    """The bits of the results, and plain values as they are; or what was raised."""
    torch.manual_seed(1)
    try:
        results = run(inputs)
    except RuntimeError as error:
        return str(error)
    return [bits(result) if isinstance(result, torch.Tensor) else repr(result) for result in results]


def assert_as_plain(
    function: Callable[..., Any], trace: Trace, planned: Schedule, lanes: int, inputs: list[torch.Tensor]
) -> None:
    """Results, what was written to (arguments, the array) and random numbers; errors, after which that is undefined."""
    plain, own = [x.clone() for x in inputs], [x.clone() for x in inputs]
    ARRAY[:] = 1
    with operation_threads(1):  # as a lane has
        expected = outcome(lambda given: function(*given), plain)
    left, state = ARRAY.copy(), torch.get_rng_state()
    run = ThreadRun(trace, planned, lanes)
    for _ in range(2):  # gates are closed again after a run
        for mine, first in zip(own, inputs, strict=True):
            mine.copy_(first)
        ARRAY[:] = 1
        assert outcome(run.replay, own) == expected
        if isinstance(expected, list):
            assert np.array_equal(ARRAY, left, equal_nan=True)
            assert [bits(value) for value in own] == [bits(value) for value in plain]
            assert torch.equal(torch.get_rng_state(), state)


@given(
    STEPS, st.integers(1, 3), st.randoms(use_true_random=False), st.sampled_from([schedule, schedule_chains]), st.data()
)
@settings(max_examples=examples(25), deadline=None)
def test_random_programs_equal_eager_to_the_bit(
    steps: list[tuple[str, int, int]], lanes: int, chance: Any, way: Any, data: st.DataObject
) -> None:
    """Writes in place, views and random numbers, on lanes chosen by random costs; arguments written to as well."""
    function = program(steps)
    torch.manual_seed(0)
    inputs = [torch.randn(3, 3) for _ in range(3)]
    trace = traced(function, *inputs)
    tasks = [replace(task, seconds=chance.random(), share=1.0) for task in threads.tasks(trace)]
    planned = scheduled(trace, lanes, tasks, way)
    no_wait_can_be_taken_away(planned, data)
    assert_as_plain(function, trace, planned, lanes, inputs)


# What operations do beside their results

LSTM = torch.nn.LSTM(3, 3)
ARRAY = np.zeros((4, 3), dtype=np.float32)
WHOLE, AGAIN, REST = torch.from_numpy(ARRAY), torch.from_numpy(ARRAY), torch.from_numpy(ARRAY[1:])


def _attention(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In bfloat16, with its backward pass: products of batches end in views that do not say so."""
    with torch.enable_grad():
        q, k = (value.detach().clone().bfloat16()[None].requires_grad_() for value in (a, b))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ k
        first, second = torch.autograd.grad(y.float().square().sum(), [q, k])
    return (first[0] + second[0].t()).float()


def _recurrent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradients of both biases: one of them is written to."""
    with torch.enable_grad():
        loss = LSTM(a.detach().clone()[None])[0].square().sum()
        *_, one, other = torch.autograd.grad(loss, list(LSTM.parameters()))
    one.mul_(2)
    return other[:9].view(3, 3) + b


_ODD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cholesky": lambda a, b: torch.linalg.cholesky(a * 0.1 + a.t() * 0.1 + torch.eye(3)) + b,
    "inv": lambda a, b: torch.linalg.inv(a.round() + torch.eye(3)) @ b,
    "assert": lambda a, b: (torch._assert_async((a < 3).all(), "too large"), a - b)[1],
    "attention": _attention,
    "recurrent": _recurrent,
    "whole_": lambda a, b: (WHOLE[1:].add_(a), b + 1)[1],  # a write to an array that others see
    "rest_": lambda a, b: REST.mul_(0.5) + a,
    "array": lambda a, b: AGAIN[1:] * 2 + REST + b,
}
ODD_STEPS = st.lists(
    st.tuples(
        st.sampled_from([*_ODD, *_ODD, "mm", "add_", "split", "dropout", "view"]),
        st.integers(0, 50),
        st.integers(0, 50),
    ),
    min_size=1,
    max_size=6,
)
PLAIN_VALUES = st.lists(st.sampled_from([None, True, 1, 1.0, 2.5, float("nan"), "a", torch.float32]), max_size=3)


@given(ODD_STEPS, st.integers(1, 3), st.randoms(use_true_random=False), PLAIN_VALUES)
@settings(max_examples=examples(10), deadline=None)
def test_random_programs_with_checks_and_hidden_memory(
    steps: list[tuple[str, int, int]], lanes: int, chance: Any, values: list[Any]
) -> None:
    of_tensors = program(steps)

    def function(*inputs: torch.Tensor) -> list[Any]:
        return [*values, *of_tensors(*inputs)]

    torch.manual_seed(0)
    inputs = [torch.randn(3, 3) for _ in range(3)]
    trace = traced(function, *inputs)
    tasks = [replace(task, seconds=chance.random()) for task in threads.tasks(trace)]
    assert_as_plain(function, trace, scheduled(trace, lanes, tasks), lanes, inputs)


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
            for value, other in zip(run.replay([x, own]), expected, strict=True):
                assert torch.equal(value, other)
                assert value.is_inference()
