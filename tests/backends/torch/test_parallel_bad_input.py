"""What ``mh.parallel`` does with functions and arguments that are not as plain as one would like: what eager does."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.parallel import trials
from manyhands.parallel.function import Parallel

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="virtual devices hold for one thread: lanes are not used with them"
)


@torch.library.custom_op("manyhands_tests::rests", mutates_args=())
def rests(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return x.clone()


@rests.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


ERRORS: list[Exception] = []  # what the next calls of the operation below raise
CALLS: list[str] = []


@torch.library.custom_op("manyhands_tests::breaks", mutates_args=())
def breaks(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(threading.current_thread().name)
    time.sleep(0.005)
    if ERRORS:
        raise ERRORS.pop(0)
    return x + 1


@breaks.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def two_chains(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x, y = breaks(x), rests(y)
    return x + y


@pytest.fixture(scope="module")
def planned_once() -> Parallel:
    """A function that is run on two lanes, because it sleeps on both."""
    if torch.get_num_threads() < 2:
        pytest.skip("one core: no lanes")
    fast = mh.parallel(two_chains)
    assert fast(torch.ones(2), torch.ones(2)).tolist() == [6, 6]
    assert "run as 2 lanes" in fast.explain()
    return fast


@pytest.fixture
def on_lanes(planned_once: Parallel) -> Iterator[Parallel]:
    yield planned_once
    ERRORS.clear()


# Python state


def test_effects_on_python_state_happen_at_every_call() -> None:
    log: list[int] = []
    settings = {"count": 0}

    def function(x: torch.Tensor) -> torch.Tensor:
        log.append(len(log))
        settings["count"] += 1
        return x * settings["count"]

    fast = mh.parallel(function)
    for number in range(1, 4):
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), float(number)))
        assert settings["count"] == len(log) == number


def test_an_attribute_of_the_model_is_asked_of_the_model() -> None:
    fast = mh.parallel(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"Linear has it: keep Linear .* or write \.function\.parameters"):
        fast.parameters()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'Parallel' object has no attribute 'parametres'"):
        fast.parametres()  # type: ignore[attr-defined]


def test_an_attribute_that_is_set_is_set_at_every_call() -> None:
    class Counter:
        calls = 0

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    counter = Counter()
    fast = mh.parallel(counter.__call__)
    assert [fast(torch.zeros(1)).item() for _ in range(3)] == [1, 2, 3]
    assert counter.calls == 3


# Arguments


def test_another_shape_type_or_layout_is_planned_anew() -> None:
    fast = mh.parallel(lambda x, y: (x @ y).relu() + 1, synchronous=True)
    for x in (
        torch.randn(3, 3),
        torch.randn(5, 3),
        torch.randn(3, 3).double(),
        torch.randn(3, 3).t(),
        torch.randn(3, 3).to(torch.bfloat16),
        torch.randn(3, 3),
    ):
        y = torch.randn(3, 3).to(x.dtype)
        result = fast(x, y)
        assert torch.equal(result, (x @ y).relu() + 1)
        assert result.dtype == x.dtype
    elsewhere = [torch.ones(3, 3, device="meta") for _ in range(2)]
    assert fast(*elsewhere).device.type == "meta"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(torch.ones(3, 2), torch.ones(3, 3))


def test_an_objects_own_shape_is_its_own_affair() -> None:
    class Box:
        shape = [1, 2]  # noqa: RUF012 - not hashable

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    for value in (Box(), Refusing()):
        assert mh.parallel(lambda x, y: x + 1)(torch.ones(2), value).tolist() == [2, 2]


def test_arguments_that_share_memory() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    fast = mh.parallel(function, synchronous=True)
    apart = torch.zeros(4), torch.zeros(4)
    assert fast(*apart).tolist() == [0, 0, 0, 0]
    one = torch.zeros(4)
    assert fast(one, one).tolist() == [2, 2, 2, 2]
    both = torch.zeros(6)
    assert fast(both[:4], both[2:]).tolist() == [2, 2, 0, 0]
    assert fast(*apart).tolist() == [0, 0, 0, 0]
    assert apart[0].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("order", ["ssds", "sdsd", "dssd"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_arguments_that_share_memory_at_some_calls(order: str, *, synchronous: bool) -> None:
    """Dynamo guards nothing of that: the first call's graph would be used for all."""

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return a[:3], (b * 2).sin() + a

    fast = mh.parallel(function, synchronous=synchronous)
    for kind in order:
        results = []
        for called in (fast, function):
            memory = torch.arange(12.0)
            a, b = memory[:6], memory[2:8] if kind == "s" else memory[6:]
            results.append([*called(a, b), memory])
        assert all(map(torch.equal, *results)), kind


def test_results_that_are_arguments_are_the_same_objects() -> None:
    x, w = torch.ones(2), nn.Parameter(torch.ones(2))

    def function(x: torch.Tensor) -> Any:
        return {"same": x, "view": x[:1], "weight": w, "in place": x.mul_(2)}

    found = mh.parallel(function)(x)
    assert found["same"] is x
    assert found["in place"] is x
    assert found["weight"] is w
    assert found["view"].data_ptr() == x.data_ptr()
    assert x.tolist() == [2, 2]


# Errors


def test_an_error_in_a_task_is_raised_and_nothing_is_left_running(on_lanes: Parallel) -> None:
    ERRORS.append(ArithmeticError("on purpose"))
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        on_lanes(torch.ones(2), torch.ones(2))
    assert "raise ERRORS.pop(0)" in "".join(traceback.format_exception(caught.value))
    assert on_lanes(torch.ones(2), torch.ones(2)).tolist() == [6, 6]


def test_an_error_of_the_function_itself_is_eagers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            raise ValueError("too long")
        return x + 1

    fast = mh.parallel(function)
    assert fast(torch.ones(2)).tolist() == [2, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="too long"):
            fast(torch.ones(3))


def test_an_interrupt_stops_all_lanes(on_lanes: Parallel) -> None:
    timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        on_lanes(torch.ones(2), torch.ones(2))
    timer.join()
    assert on_lanes(torch.ones(2), torch.ones(2)).tolist() == [6, 6]


OUT_OF_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried 1 byte")


def test_out_of_memory_falls_back_to_plain_execution_and_says_so() -> None:
    fast = mh.parallel(two_chains, synchronous=True)
    fast(torch.ones(2), torch.ones(2))
    ERRORS.append(OUT_OF_MEMORY)
    assert fast(torch.ones(2), torch.ones(2)).tolist() == [6, 6]
    assert not ERRORS
    assert "ran out of memory: plain execution is used instead" in fast.explain()
    CALLS.clear()
    fast(torch.ones(2), torch.ones(2))
    assert set(CALLS) == {threading.current_thread().name}


def test_out_of_memory_after_a_write_is_not_repeated() -> None:
    total = torch.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return breaks(x)

    fast = mh.parallel(function, synchronous=True)
    fast(torch.ones(2))
    ERRORS.append(OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="allocate memory"):
        fast(torch.ones(2))


def test_an_error_after_a_write_is_not_repeated() -> None:
    total = torch.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return breaks(x)

    fast = mh.parallel(function, synchronous=True)
    fast(torch.ones(2))
    ERRORS.append(ArithmeticError("on purpose"))
    with pytest.raises(ArithmeticError, match="on purpose"):
        fast(torch.ones(2))


# Planning that fails


def test_what_fails_while_plans_are_tried_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("of ours")

    fast = mh.parallel(lambda x: x + 1)
    with monkeypatch.context() as patch:
        patch.setattr(trials, "in_turns", broken)
        assert fast(torch.ones(2)).tolist() == [2, 2]
        assert "it could not be planned: KeyError: 'of ours'" in fast.explain()


def test_the_functions_own_error_at_the_first_call_is_plain_executions() -> None:
    def function(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(rows, x).sin()

    x, rows = torch.rand(3, 2), torch.tensor([0, 1])
    fast = mh.parallel(function)
    with pytest.raises(IndexError) as plain:
        function(x, rows + 7)
    with pytest.raises(IndexError) as ours:
        fast(x, rows + 7)
    assert str(ours.value) == str(plain.value)
    for _ in range(2):
        torch.testing.assert_close(fast(x, rows), function(x, rows))
    with pytest.raises(IndexError):
        fast(x, rows + 7)


def test_no_memory_for_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(trials, "in_turns", no_memory)
    fast = mh.parallel(lambda x: x + 1)
    assert fast(torch.ones(2)).tolist() == [2, 2]
    assert "out of memory while planning" in fast.explain()


def test_an_imaginary_part_is_a_difference() -> None:
    same, difference = planning.equal([torch.tensor([1 + 1j])], [torch.tensor([1 + 2j])])
    assert not same
    assert difference > 0.1
