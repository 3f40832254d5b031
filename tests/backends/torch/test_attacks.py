"""Short programs with effects and surroundings: ``parallel`` gives what plain execution gives, each effect once.

Each is run by default, and with plans that are always used. What Dynamo itself gets wrong with
``torch.compile(fn, backend="aot_eager")`` is listed in ``docs/parallel.md``; :data:`OF_DYNAMO` holds it to the list.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ordinary_programs
import pytest
import torch
from graph_cases import by_dynamo
from ordinary_programs import error_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands import torch as mh

X = torch.arange(16.0).reshape(4, 4) / 10
Program = Callable[[Callable[[Callable[..., Any]], Callable[..., Any]]], Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """On one thread: the last bits of BatchNorm depend on how many an operation has, and plans may use one each."""
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def bound_append(make: Any) -> Any:
    log: list[int] = []
    push = log.append

    def function(x: torch.Tensor) -> torch.Tensor:
        push(len(log))
        return (x @ x).sin()

    fast = make(function)
    return [fast(X) for _ in range(3)], log


def os_write(make: Any) -> Any:
    read, write = os.pipe()

    def function(x: torch.Tensor) -> torch.Tensor:
        os.write(write, b"seen ")
        return (x @ x).sin()

    fast = make(function)
    results = [fast(X) for _ in range(4)]
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return results, file.read()


def numpy_state(make: Any) -> Any:
    generator = np.random.default_rng(3)
    np.random.seed(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x) * float(np.random.rand()) + float(generator.random())

    fast = make(function)
    return [fast(X) for _ in range(3)], float(np.random.rand()), float(generator.random())


def equal_outside(make: Any) -> Any:
    outside, other = torch.ones(4), torch.ones(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x if torch.equal(outside, other) else x - 1

    fast = make(function)
    results = [fast(X), fast(X)]
    outside.add_(1)
    return [*results, fast(X)]


GLOBAL = X.clone()


def identity_with_a_global(make: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x if x is GLOBAL else x - 1

    fast = make(function)
    return fast(GLOBAL), fast(X), fast(GLOBAL)


def unused_operation_raises(make: Any) -> Any:
    def function(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x.index_select(0, rows)
        return (x @ x).sin()

    fast = make(function)
    return [error_of(lambda rows=rows: fast(X, torch.tensor([rows]))) for rows in (1, 2, 9)]


def saved_tensors_hooks_later(make: Any) -> Any:
    packed: list[tuple[int, ...]] = []
    weight = nn.Parameter(torch.ones(4, 4))

    def pack(value: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(value.shape))
        return value

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x @ weight) * (x @ weight)).sum()

    fast = make(function)
    fast(X).backward()
    fast(X).backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        fast(X).backward()
    return weight.grad, bool(packed)


def optimizer_hook_later(make: Any) -> Any:
    weight, steps = nn.Parameter(torch.ones(4, 4)), list[int]()
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ weight).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = make(step)
    results = [fast(X), fast(X)]
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return [*results, fast(X), fast(X)], steps, weight


def torch_cond(make: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x - 1, (x,))

    fast = make(function)
    return [fast(X), fast(-X - 1), fast(X), function(X)]


def deep_copy(make: Any) -> Any:
    net = nn.Linear(4, 4)
    with torch.no_grad():
        net.weight.fill_(0.5), net.bias.fill_(0.25)
    fast = make(net)
    first = fast(X)
    other = copy.deepcopy(fast)
    with torch.no_grad():
        net.weight.zero_()
    return first, other(X), fast(X)


def nested_tensor(make: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x, x[:2]])
        return nested.to_padded_tensor(0.0).sum(0)

    fast = make(function)
    return [fast(X), fast(X), function(X)]


def error_of_values_in_a_try(make: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x * 3

    fast = make(function)
    return fast(torch.eye(4)), error_of(lambda: fast(-torch.eye(4)))


def checkpoint_with_dropout(make: Any) -> Any:
    """The pass that is computed again draws what the first one drew."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(net(x).tanh(), 0.5, True)

    def function(x: torch.Tensor) -> Any:
        y = checkpoint(part, checkpoint(part, x, use_reentrant=False), use_reentrant=False)
        return y.detach(), torch.autograd.grad(y.square().sum(), [*net.parameters()])

    fast = make(function)
    return [fast(torch.eye(4)) for _ in range(3)]


PROGRAMS = [
    bound_append,
    os_write,
    numpy_state,
    equal_outside,
    identity_with_a_global,
    unused_operation_raises,
    saved_tensors_hooks_later,
    optimizer_hook_later,
    torch_cond,
    deep_copy,
    nested_tensor,
    error_of_values_in_a_try,
    checkpoint_with_dropout,
]
# Wrong under torch.compile(backend="aot_eager"), too: the first table of docs/parallel.md.
OF_DYNAMO = {identity_with_a_global, unused_operation_raises, error_of_values_in_a_try}


BY_DYNAMO = functools.partial(by_dynamo, backward=True)  # as ``parallel`` captures them


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"synchronous": True}], ids=["default", "planned"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_results_and_effects_are_those_of_plain_execution(program: Program, options: dict[str, Any]) -> None:
    expected = program(lambda function: function)
    found = error_of(lambda: program(lambda function: mh.parallel(function, **options)))
    if program in OF_DYNAMO:
        assert same(found, expected) or same(found, error_of(lambda: program(BY_DYNAMO)))
    else:
        assert same(found, expected), (found, expected)


@pytest.mark.filterwarnings("ignore")
def test_what_the_table_says_of_dynamo_is_true() -> None:
    for program in OF_DYNAMO:
        expected = program(lambda function: function)
        found = error_of(lambda program=program: program(BY_DYNAMO))
        assert not same(found, expected), f"{program.__name__}: the table of docs/parallel.md can be shorter"


_LONG = pytest.mark.long


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"synchronous": True}, marks=_LONG), pytest.param({"dynamic": True}, marks=_LONG)]
)
@pytest.mark.parametrize("program", ordinary_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_ordinary_programs(program: Program, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = program(lambda function: function)
    torch.manual_seed(0)
    found = program(lambda function: mh.parallel(function, **options))
    assert same(found, expected), (found, expected)
