"""Random programs: whatever is fused, results are the same to the bit and no large operation waits for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from region_cases import uncompiled
from support import examples

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture import call as torch_call
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes import regions
from manyhands.backends.torch.passes.out_of_place import make_out_of_place
from manyhands.backends.torch.run.codegen import Plan
from manyhands.errors import CannotFuse
from manyhands.schedule.task import needs

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)

N = 3
OPERATIONS: list[Callable[..., Any]] = [
    lambda a, b: a @ b,
    lambda a, b: a + b,
    lambda a, b: (a * b).sin(),
    lambda a, b: a.cos(),
    lambda a, b: a.t(),
    lambda a, b: a.t().relu(),
    lambda a, b: a.sum(0, keepdim=True) + b,
    lambda a, b: torch.softmax(a, 1),
    lambda a, b: a.clone(),
    lambda a, b: a[:2].exp().sum() * b,
    lambda a, b: torch.dropout(a, 0.5, True),
    lambda a, b: a.add_(1),
    lambda a, b: a.t()[0].mul_(2).sum() + b,
    lambda a, b: a.copy_(b.clone()) * 2,
]
# What each line takes: an operation and two earlier values, counted from the end; and which values are results.
LINES = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 5), st.integers(0, 5)), max_size=14)
# Around convolutions: nothing that makes much of a last digit, which an addition outside of them may change.
BIASED: list[Callable[..., Any]] = [
    lambda a, b: torch.conv1d(a[None], b[:, :, None].sin(), b[0])[0].sin(),
    lambda a, b: torch.conv1d(a[None], b.t()[:, :, None].sin(), a.sum(1))[0],
    lambda a, b: torch.conv1d(a[None], b[:, :, None].cos(), torch.zeros(N, dtype=a.dtype) + 1).relu()[0].cos(),
    lambda a, b: a.sin() + b.cos(),
    lambda a, b: a.cos(),
    lambda a, b: a.t(),
    lambda a, b: (a @ b).sin(),
    lambda a, b: a.relu_(),
    lambda a, b: a.sin_(),
    lambda a, b: a[0].add_(1).cos() + b,
]


def program(
    lines: list[tuple[int, int, int]], results: int, operations: list[Callable[..., Any]] = OPERATIONS
) -> Callable[..., Any]:
    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        values = [x * 1, y * 1, x @ y]
        for number, first, second in lines:
            operation = operations[number % len(operations)]
            values.append(operation(values[-1 - first % len(values)], values[-1 - second % len(values)]))
        return [value for number, value in enumerate(values) if results >> number & 1] or values[-1:]

    return run


LARGE = ("mm", "native_dropout", "bernoulli_", "add_", "mul_", "copy_")


def large_before(found: Trace) -> dict[str, list[int]]:
    """How many large operations come before each large operation."""
    before: list[frozenset[int]] = []
    counts: dict[str, list[int]] = {}
    for step, earlier in zip(found.steps, needs(found.tasks), strict=True):
        own = (before[one] | ({one} if found.steps[one].task.name in LARGE else frozenset()) for one in earlier)
        before.append(frozenset().union(*own))
        if step.task.name in LARGE:
            counts.setdefault(step.task.name, []).append(len(before[-1]))
    return {name: sorted(each) for name, each in counts.items()}


def results(found: Trace, call: Any) -> list[Any]:
    count = len(found.steps)
    run = backend.thread_run(found, Plan(["cpu"], [0] * count, list(range(count)), {}), 1)
    torch.manual_seed(0)
    return backend.observed(found, call, run)


@settings(max_examples=examples(30), deadline=None)
@given(LINES, st.integers(0, 2**17 - 1))
def test_random_programs(lines: list[tuple[int, int, int]], chosen: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.rand(N, N, generator=generator) for _ in range(2))
    call = torch_call.call((x, y), {})
    found = torch_call.trace(program(lines, chosen), call)
    try:
        fused = regions.fuse(found, uncompiled)
    except CannotFuse:
        return
    assert backend.equal(results(fused, call), results(found, call)) == (True, 0.0)
    # What is in place is made pure first, and may be part of a region then.
    assert large_before(fused) == large_before(make_out_of_place(found))


@settings(max_examples=examples(30), deadline=None)
@given(LINES, st.integers(0, 2**17 - 1))
def test_random_programs_with_biases_taken_out(lines: list[tuple[int, int, int]], chosen: int) -> None:
    """Whatever is written to in between, and whoever wants the convolution's result again."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.rand(N, N, generator=generator, dtype=torch.float64) for _ in range(2))
    call = torch_call.call((x, y), {})
    found = torch_call.trace(program(lines, chosen, BIASED), call)
    try:
        fused = regions.fuse(found, uncompiled, ("cpu",))
    except CannotFuse:
        return
    assert all(step.node.args[2] is None for step in fused.steps if step.task.name == "convolution")
    for one, other in zip(results(fused, call), results(found, call), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
