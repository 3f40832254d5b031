"""What Python code depends on besides tensors, modules and settings: each change is noticed, by Dynamo's guards."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.errors import CannotGuard
from manyhands.parallel import pieces

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
    assert "reads values of a tensor from outside" in fast.explain()


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
    assert "guarded by manyhands: Dynamo cannot trace it (it is a riddle)" in fast.explain()
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


# Whole training steps


class Settings:
    scale = 2.0


def of_a_weak_reference() -> Any:
    settings = Settings()
    weak = weakref.ref(settings)
    return lambda: weak().scale, lambda: setattr(settings, "scale", settings.scale + 1)  # type: ignore[union-attr]


def of_a_user_dict() -> Any:
    settings = UserDict(scale=2.0)
    return lambda: settings["scale"], lambda: settings.update(scale=settings["scale"] + 1)


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (of_a_weak_reference, nn.Linear),
        (of_a_user_dict, nn.Linear),
        pytest.param(of_a_user_dict, nn.GRU, marks=pytest.mark.long),
    ],
)
def test_a_training_step_notices_what_its_code_looks_at(make: Callable[[], Any], layer: type[nn.Module]) -> None:
    scale, change = make()
    net: Any = layer(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def losses(x: torch.Tensor) -> torch.Tensor:
        found = net(x)
        return (found[0] if isinstance(found, tuple) else found).square().mean() * scale()  # type: ignore[no-any-return]

    def step(x: torch.Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = losses(x)
        loss.backward()
        optimizer.step()
        return {"losses": [loss]}

    fast = mh.parallel(step, synchronous=True)
    for number in range(4):
        assert torch.equal(fast(X[0, 0])["losses"][0], losses(X[0, 0]))
        if number % 2:
            change()
    assert fast.planned.guards is not None
    assert "synchronous" in fast.explain()


def test_guarding_a_training_step_leaves_its_optimizer_alone() -> None:
    """Dynamo would set ``capturable`` where it follows an update."""
    net = nn.Linear(8, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(X[0, 0])
    settings = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    update, clear = type(optimizer).step, type(optimizer).zero_grad
    fast = mh.parallel(step, synchronous=True)
    for rate in (0.1, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = settings[0]["lr"] = rate
        before = net.weight.detach().clone()
        fast(X[0, 0])
        assert not torch.equal(net.weight, before)
        assert [{**group, "params": len(group["params"])} for group in optimizer.param_groups] == settings
    assert (type(optimizer).step, type(optimizer).zero_grad) == (update, clear)
    assert fast.planned.guards is not None


def cleared_and_derived() -> Callable[[torch.Tensor], torch.Tensor]:
    layer = nn.Linear(8, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        for weight in layer.parameters():
            weight.grad = None
        loss = layer(x).sum()
        loss.backward()
        return loss.detach()

    return step


def test_what_is_compiled_after_a_captured_step_knows_nothing_of_it() -> None:
    """Dynamo's one None for all captures would be read from ``layer.weight.grad`` here, as the queue's ``maxlen``."""
    step = cleared_and_derived()
    assert mh.parallel(step, synchronous=True)(X[0, 0]).isfinite()
    queue = deque([1, 2])

    def append(x: torch.Tensor) -> torch.Tensor:
        queue.append(queue[0])
        return x * 2

    assert torch.equal(torch.compile(append, backend="eager")(X), X * 2)
    assert list(queue) == [1, 2, 1]


def test_what_others_compiled_before_does_not_disturb_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_TOO_SHORT", 0.0)
    step = cleared_and_derived()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(lambda function, x: function(x), backend="eager")(step, X[0, 0])
    queue = deque([1, 2])

    def append(x: torch.Tensor) -> torch.Tensor:
        queue.append(queue[0])
        return x * 2

    fast = mh.parallel(append, synchronous=True)
    assert [torch.equal(fast(X), X * 2) for _ in range(3)] == [True] * 3
    assert list(queue) == [1, 2, 1, 1, 1]
    assert "Dynamo failed" not in fast.explain()


_GUARDED = """
import sys
import torch
from torch import nn
from manyhands.backends.torch import planning

net = nn.Linear(3, 3)

def step(x):
    net.zero_grad()
    loss = net(x).sum()
    loss.backward()
    return loss.detach()

arguments = (torch.ones(2, 3),)
trace = planning.trace(step, planning.call(arguments, {}))
assert planning.guards(step, arguments, {}, trace)(arguments, {})
unwanted = {"torch._functorch.aot_autograd", "torch._inductor.codecache", "networkx"}
print(sorted(unwanted & set(sys.modules)))
"""


def test_guards_do_not_import_what_compiles_graphs() -> None:
    done = subprocess.run([sys.executable, "-c", _GUARDED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
