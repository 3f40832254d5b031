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
from manyhands.backends.torch.run import threads as torch_threads
from manyhands.parallel.function import Parallel
from manyhands.parallel.plan import Planned

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
    planned = planned_once.planned
    run, way, exactness = planned.run, planned.way, planned.exactness
    yield planned_once
    ERRORS.clear()
    planned.run, planned.way, planned.exactness = run, way, exactness


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
    assert "which is outside it" in fast.explain()


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
    assert "only CPUs and CUDA's GPUs are planned" in fast.explain()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(torch.ones(3, 2), torch.ones(3, 3))


def test_arguments_that_share_memory() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    fast = mh.parallel(function, synchronous=True)
    apart = torch.zeros(4), torch.zeros(4)
    assert fast(*apart).tolist() == [0, 0, 0, 0]
    one = torch.zeros(4)
    assert fast(one, one).tolist() == [2, 2, 2, 2]
    assert "share memory" in fast.explain()
    both = torch.zeros(6)
    assert fast(both[:4], both[2:]).tolist() == [2, 2, 0, 0]
    assert fast(*apart).tolist() == [0, 0, 0, 0]
    assert apart[0].tolist() == [2, 2, 2, 2]


def test_an_argument_that_is_also_taken_from_outside() -> None:
    """The trace takes it for two memories, which nothing orders: such a call is run as it is written."""
    base, other = torch.zeros(4), torch.ones(4)

    def function(x: torch.Tensor) -> Any:
        x.add_(1)
        return rests(base) * 2, other + 1

    fast = mh.parallel(function, synchronous=True)
    fast(torch.ones(4))
    planned = fast.planned
    assert planning.mixing(trace := planning.trace(function, planning.call((other,), {}))) is not None
    assert [planning.mixing(trace)([one]) for one in (base, other, torch.ones(4))] == [True, True, False]
    plainly = []
    fast.function = lambda x: plainly.append(x) or function(x)
    assert fast(base)[0].tolist() == [2, 2, 2, 2]
    assert fast(base[1:].clone().new_ones(4))[0].tolist() == [2, 2, 2, 2]
    assert all(one is base for one in plainly)
    assert plainly
    assert fast.planned is planned
    assert planning.mixing(planning.trace(lambda x: x + base, planning.call((other,), {}))) is None


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


def test_an_error_in_a_task_is_plain_executions_and_nothing_is_left_running(on_lanes: Parallel) -> None:
    """On lanes it only shows that the call is to be done plainly: the function may have a branch for it."""
    ERRORS.extend([ArithmeticError("on lanes"), ArithmeticError("on purpose")])
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        on_lanes(torch.ones(2), torch.ones(2))
    shown = "".join(traceback.format_exception(caught.value))
    assert "raise ERRORS.pop(0)" in shown
    assert "in two_chains" in shown
    assert not any(worker._busy for worker in torch_threads.pool()._idle)
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
    assert not any(worker._busy for worker in torch_threads.pool()._idle)
    assert on_lanes(torch.ones(2), torch.ones(2)).tolist() == [6, 6]


OUT_OF_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried 1 byte")


def test_out_of_memory_falls_back_to_plain_execution_and_says_so(on_lanes: Parallel) -> None:
    run = on_lanes.planned.run
    ERRORS.append(OUT_OF_MEMORY)
    assert on_lanes(torch.ones(2), torch.ones(2)).tolist() == [6, 6]
    assert not ERRORS
    assert on_lanes.planned.run is not run
    assert "ran out of memory: plain execution is used instead" in on_lanes.explain()
    CALLS.clear()
    on_lanes(torch.ones(2), torch.ones(2))
    assert set(CALLS) == {threading.current_thread().name}


def test_out_of_memory_after_a_write_is_not_repeated() -> None:
    total = torch.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return breaks(x)

    fast = mh.parallel(function, synchronous=True)
    fast(torch.ones(2))
    ERRORS.append(OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        fast(torch.ones(2))
    assert any("cannot be repeated" in note for note in caught.value.__notes__)


def test_random_numbers_are_the_same_after_a_fall_back() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return breaks(x + torch.rand(2)) + torch.rand(2)

    fast = mh.parallel(function, synchronous=True)
    fast(torch.ones(2))
    torch.manual_seed(0)
    expected = function(torch.ones(2))
    torch.manual_seed(0)
    ERRORS.append(OUT_OF_MEMORY)
    assert torch.equal(fast(torch.ones(2)), expected)
    assert "ran out of memory" in fast.explain()


def test_an_error_after_a_write_is_not_repeated() -> None:
    total = torch.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return breaks(x)

    fast = mh.parallel(function, synchronous=True)
    fast(torch.ones(2))
    ERRORS.append(ArithmeticError("on purpose"))
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        fast(torch.ones(2))
    assert any("in breaks (task" in note for note in caught.value.__notes__)


# Planning that fails


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_functions_that_take_only_some_numbers_are_planned_with_such(value: float) -> None:
    """All numbers of an argument are the same, so that others are tried: probabilities have to stay probabilities."""
    functions: list[Any] = [
        lambda p: torch.bernoulli(p) + (p @ p).sin(),
        lambda p: torch.nn.functional.binary_cross_entropy(p, p) + (p @ p).sin(),
    ]
    for function in functions:
        p, fast = torch.full((8, 8), value), mh.parallel(function)
        for _ in range(2):
            torch.manual_seed(0)
            expected = function(p)
            torch.manual_seed(0)
            torch.testing.assert_close(fast(p), expected)
        assert "could not be planned" not in fast.explain()
        assert "does not take" not in fast.explain()


def test_a_function_that_takes_no_other_numbers_is_compared_with_what_it_takes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(torch.diag(x - 0.5)) @ x.expand(4, 4)

    x, fast = torch.ones(4), mh.parallel(function)
    for _ in range(2):
        torch.testing.assert_close(fast(x), function(x))
    assert "the function does not take others (" in fast.explain()
    assert fast.planned.seconds


def test_what_fails_while_plans_are_tried_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("of ours")

    fast = mh.parallel(lambda x: x + 1)
    with monkeypatch.context() as patch:
        patch.setattr(planning, "expected", broken)
        assert fast(torch.ones(2)).tolist() == [2, 2]
        assert "it could not be planned: KeyError: 'of ours'" in fast.explain()
    assert fast(torch.ones(2)).tolist() == [2, 2]
    assert "it could not be planned" not in fast.explain()  # tried once more at the second call
    fast = mh.parallel(lambda x: x + 2)
    monkeypatch.setattr(planning, "trace", broken)
    for _ in range(3):
        assert fast(torch.ones(2)).tolist() == [3, 3]
    assert "cannot be traced: KeyError" in fast.explain()


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
    assert fast.planned.seconds
    with pytest.raises(IndexError):
        fast(x, rows + 7)


def test_no_memory_for_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(planning, "expected", no_memory)
    fast = mh.parallel(lambda x: x + 1)
    assert fast(torch.ones(2)).tolist() == [2, 2]
    assert "out of memory while planning" in fast.explain()


def test_an_imaginary_part_is_a_difference() -> None:
    same, difference = planning.equal([torch.tensor([1 + 1j])], [torch.tensor([1 + 2j])])
    assert not same
    assert difference > 0.1


def test_memory_that_all_calls_share_is_used_by_one_thread_at_a_time() -> None:
    """As a CUDA graph's: what a replay leaves is copied before the next one begins."""

    class Shared:
        concurrent = False
        kept = torch.zeros(())

        def replay(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.kept.copy_(inputs[0])
            time.sleep(0.002)
            return [self.kept.clone()]

    one = Parallel(lambda x: x + 0, planning, synchronous=True)
    call = planning.call((torch.ones(()),), {})
    replay = one._replaying(Planned(one._plainly), planning.trace(one.function, call), Shared())
    wrong = []

    def work(number: int) -> None:
        for _ in range(5):
            if float(replay([torch.tensor(float(number))], (), {})) != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
