"""Calls that have to be run as they are written, and are: somebody listens, derives, prints, seeds or makes objects."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from manyhands import torch as mh
from manyhands.parallel.function import Parallel

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="virtual devices are a mode of their own, which listens too"
)

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def function(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin().sum()


def planned(one: Callable[..., Any] = function) -> Parallel:
    """The traced code is always used, in the caller's thread."""
    return Parallel(one, synchronous=True)


def planned_twice() -> Parallel:
    fast = planned()
    for _ in range(2):
        fast(X)
    assert "synchronous" in fast.explain()
    return fast


# Somebody listens, or derives


@pytest.mark.parametrize("before", [planned, planned_twice])
def test_a_mode_sees_every_operation_once(before: Callable[[], Parallel]) -> None:
    fast = before()
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(fast(X), function(X))
    assert counter.get_total_flops() == 2 * 2 * 4**3
    assert "mode" in fast.explain()


@pytest.mark.parametrize("before", [planned, planned_twice])
def test_a_function_mode_sees_every_call_once(before: Callable[[], Parallel]) -> None:
    called = []

    class Listener(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    fast = before()
    with Listener():
        fast(X)
    assert called.count("sin") == 1


def test_another_default_device_is_another_call() -> None:
    fast = planned(lambda x: (x + 1, torch.zeros(2)))
    for _ in range(2):
        assert fast(X)[1].device.type == "cpu"
    with torch.device("meta"):
        assert fast(X)[1].device.type == "meta"
    assert fast(X)[1].device.type == "cpu"


@pytest.mark.parametrize("before", [planned, planned_twice])
def test_transformations(before: Callable[[], Parallel]) -> None:
    fast = before()
    assert torch.equal(torch.func.grad(fast)(X), torch.func.grad(function)(X))
    assert torch.equal(torch.vmap(fast)(X.repeat(2, 1, 1)), torch.vmap(function)(X.repeat(2, 1, 1)))
    for one, other in zip(torch.func.jvp(fast, (X,), (X,)), torch.func.jvp(function, (X,), (X,)), strict=True):
        assert torch.equal(one, other)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        expected, found = (forward_ad.unpack_dual(one(dual)).tangent for one in (function, fast))
        assert torch.equal(found, expected)
    assert torch.equal(make_fx(fast)(X)(X * 2), function(X * 2))


# Effects


def test_what_is_printed_is_printed_at_every_call_once(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(x: torch.Tensor) -> torch.Tensor:
        print("seen")
        return x + 1

    fast = planned(prints)
    for _ in range(3):
        fast(X)
    assert capsys.readouterr().out == 3 * "seen\n"
    assert "prints" in fast.explain()


log = logging.getLogger("manyhands.tests")


def test_what_is_logged_is_logged_at_every_call_once(caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: torch.Tensor) -> torch.Tensor:
        log.debug("seen")
        return x + 1

    fast = planned(logs)
    with caplog.at_level(logging.INFO, log.name):
        for _ in range(2):
            fast(X)
        assert "synchronous" in fast.explain()  # nobody wants to know it
    with caplog.at_level(logging.DEBUG, log.name):
        for _ in range(3):
            fast(X)
    assert caplog.messages.count("seen") == 3
    assert "logs" in fast.explain()


def test_a_file_is_written_at_every_call(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.touch()

    def writes(x: torch.Tensor) -> torch.Tensor:
        file.write_text(file.read_text() + "seen\n")
        return x + 1

    fast = planned(writes)
    for _ in range(3):
        fast(X)
    assert file.read_text() == 3 * "seen\n"


def test_random_numbers_of_python_and_numpy_are_drawn_as_without_it() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() * float(numpy.random.rand())

    fast = planned(draws)
    for run in (draws, fast):
        random.seed(3)
        numpy.random.seed(4)
        if run is draws:
            expected = [draws(X) for _ in range(3)]
    for one in expected:
        assert torch.equal(fast(X), one)


def generator_of_its_own() -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda x: x + torch.rand(4, 4, generator=generator)


def seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return x + torch.rand(4, 4)


def forks(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        first = torch.rand(4, 4)
    return x + first + torch.rand(4, 4)


@pytest.mark.parametrize("make", [generator_of_its_own, lambda: seeds, lambda: forks])
def test_random_numbers_of_their_own_are_the_same(make: Callable[[], Callable[..., Any]]) -> None:
    torch.manual_seed(1)
    plain = make()
    expected = [plain(X) for _ in range(3)]
    after = torch.get_rng_state()
    fast = planned(make())
    torch.manual_seed(1)
    for one in expected:
        assert torch.equal(fast(X), one)
    assert torch.equal(torch.get_rng_state(), after)


# Results and ways to compute that cannot be planned


class Box:
    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


def test_objects_that_are_results() -> None:
    fast = planned(lambda x: Box(x + 1))
    for _ in range(2):
        assert torch.equal(fast(X).content, X + 1)


def test_sparse_tensors_inside_and_outside() -> None:
    eye = torch.eye(4).to_sparse()
    for one in (lambda x: eye @ x, lambda x: x.relu().to_sparse() @ x):
        fast = planned(one)
        for _ in range(2):
            assert torch.equal(fast(X), one(X))
        assert "sparse" in fast.explain()


def test_tasks_inside_a_function() -> None:
    weight = torch.ones(4, 4)

    def tasks(x: torch.Tensor) -> torch.Tensor:
        with mh.parallel():
            first, second = mh.task(torch.mm)(x, weight), mh.task(torch.sin)(weight)
        return first.result() + second.result()

    fast = planned(tasks)
    for _ in range(2):
        assert torch.equal(fast(X), tasks(X))
        weight.mul_(2)
    with mh.parallel():  # a scope that was open before does not get them either
        assert torch.equal(planned(tasks)(X), tasks(X))


def test_threads_that_plan_and_call_at_once() -> None:
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    fast, wrong = planned(lambda x: layer(x).sin()), []

    def work(number: int) -> None:
        for size in (number % 3 + 1, 4, 5):
            x = torch.randn(size, 4)
            if not torch.equal(fast(x), layer(x).sin()):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
