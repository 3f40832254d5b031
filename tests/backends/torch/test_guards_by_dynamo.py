"""What Python code depends on besides tensors, modules and settings: each change is noticed, by Dynamo's guards."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.errors import CannotGuard

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="Dynamo captures nothing beside a dispatch mode"
)
X = torch.arange(64.0).reshape(1, 1, 8, 8)


@dataclass
class Scale:
    by: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def nested_class() -> Any:
    class Outer:
        class Inner:
            scale = 2.0

    return lambda x: x * Outer.Inner.scale, lambda: setattr(Outer.Inner, "scale", Outer.Inner.scale + 1)


def user_dict() -> Any:
    settings = UserDict(scale=2.0)
    return lambda x: x * settings["scale"], lambda: settings.update(scale=settings["scale"] + 1)


def thread_local() -> Any:
    own = threading.local()
    own.scale = 2.0
    return lambda x: x * own.scale, lambda: setattr(own, "scale", own.scale + 1)


def layer_setting() -> Any:
    pool = nn.MaxPool2d(3, 2)
    return lambda x: pool(x).sum(), lambda: setattr(pool, "ceil_mode", not pool.ceil_mode)


def set_of_numbers() -> Any:
    numbers = {1, 2}
    return lambda x: x * sum(numbers), lambda: numbers.add(max(numbers) + 1)


def replaced_code() -> Any:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def change() -> None:
        helper.__code__ = other.__code__

    return lambda x: helper(x) * 2, change


def dataclass_method() -> Any:
    scale = Scale(2.0)
    return lambda x: scale(x), lambda: setattr(scale, "by", scale.by + 1)


CHANGES = [
    nested_class,
    user_dict,
    thread_local,
    layer_setting,
    set_of_numbers,
    replaced_code,
    dataclass_method,
]


@pytest.mark.parametrize("make", CHANGES)
def test_a_change_is_noticed(make: Callable[[], Any]) -> None:
    function, change = make()
    fast = mh.parallel(function, synchronous=True)
    for _ in range(3):
        for _ in range(2):
            assert torch.equal(fast(X), function(X))
            assert "synchronous" in fast.explain()
        change()


def test_numbers_computed_from_a_tensor_outside_are_not_baked_in() -> None:
    count = torch.tensor(1.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * float(count + 1) + torch.tensor(2.0).item()

    fast = mh.parallel(function, synchronous=True)
    for _ in range(3):
        assert torch.equal(fast(X), function(X))
        count.add_(1)
    assert "reads numbers of a tensor from outside" in fast.explain()


def test_numbers_written_in_the_function_may_be_read() -> None:
    fast = mh.parallel(lambda x: x * torch.tensor(2.0).item(), synchronous=True)
    assert torch.equal(fast(X), X * 2)
    assert "synchronous" in fast.explain()


def test_capturing_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + torch.rand(8)

    fast = mh.parallel(function, synchronous=True)
    torch.set_rng_state(before)
    expected = function(X), torch.rand(1)
    torch.set_rng_state(before)
    assert torch.equal(fast(X), expected[0])
    assert torch.equal(torch.rand(1), expected[1])


def test_what_dynamo_cannot_follow_keeps_our_own_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise CannotGuard("it is a riddle")

    monkeypatch.setattr("manyhands.backends.torch.planning.guards", refuse)
    fast = mh.parallel(lambda x: x * 2, synchronous=True)
    assert torch.equal(fast(X), X * 2)
    assert "guarded by rules of our own: Dynamo cannot follow it (it is a riddle)" in fast.explain()
    assert "synchronous" in fast.explain()


@pytest.mark.parametrize("how", ["stance", "config"])
def test_a_user_who_switches_dynamo_off_gets_right_results(how: str) -> None:
    function, change = nested_class()
    fast = mh.parallel(function, synchronous=True)
    off = torch.compiler.set_stance("force_eager") if how == "stance" else torch._dynamo.config.patch(disable=True)
    with off:
        for _ in range(2):
            assert torch.equal(fast(X), function(X))
            change()
    assert "synchronous" in fast.explain()


def test_a_training_step_is_left_to_our_own_guards() -> None:
    net = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    fast = mh.parallel(step, synchronous=True)
    for _ in range(2):
        fast(X)
    assert fast.planned.guards is None
    assert "Dynamo" not in fast.explain()
