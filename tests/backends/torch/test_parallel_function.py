"""``mh.parallel`` around functions: observed, differentiated, failing, out of memory, as a decorator."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.backends.torch.run.cuda_graph import NoMemoryForResults
from manyhands.parallel import trials
from manyhands.parallel.function import Parallel

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def function(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin().sum()


def planned(one: Callable[..., Any] = function) -> Parallel:
    """The captured graph is always used, in the caller's thread."""
    return Parallel(one, synchronous=True)


def planned_twice() -> Parallel:
    fast = planned()
    for _ in range(2):
        fast(X)
    assert "synchronous" in fast.explain()
    return fast


# Somebody observes or differentiates the call


@pytest.mark.parametrize("before", [planned, planned_twice])
def test_a_mode_sees_every_operation_once(before: Callable[[], Parallel]) -> None:
    fast = before()
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(fast(X), function(X))
    assert counter.get_total_flops() == 2 * 2 * 4**3
    assert "mode" in fast.explain()


def test_a_function_mode_sees_every_call_once() -> None:
    called = []

    class Listener(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    fast = planned_twice()
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


def test_transformations() -> None:
    fast = planned_twice()
    assert torch.equal(torch.func.grad(fast)(X), torch.func.grad(function)(X))
    assert torch.equal(torch.vmap(fast)(X.repeat(2, 1, 1)), torch.vmap(function)(X.repeat(2, 1, 1)))
    for one, other in zip(torch.func.jvp(fast, (X,), (X,)), torch.func.jvp(function, (X,), (X,)), strict=True):
        assert torch.equal(one, other)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        expected, found = (forward_ad.unpack_dual(one(dual)).tangent for one in (function, fast))
        assert torch.equal(found, expected)
    assert torch.equal(make_fx(fast)(X)(X * 2), function(X * 2))


# What a function computes with


def generator_of_its_own() -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda x: x + torch.rand(4, 4, generator=generator)


def forks(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        first = torch.rand(4, 4)
    return x + first + torch.rand(4, 4)


@pytest.mark.parametrize("make", [generator_of_its_own, lambda: forks])
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


class Reader:
    """The next row of some data at every call, as long as there are any."""

    def __init__(self) -> None:
        self.rows = torch.arange(12.0).reshape(3, 4)
        self.position = torch.zeros(1, dtype=torch.int64)

    def next(self) -> torch.Tensor:
        row = self.rows.index_select(0, self.position)
        self.position += 1
        return row.sin() + row.cos()


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_function_is_not_tried_beyond_its_data(compile: bool) -> None:
    ours, theirs = Reader(), Reader()
    fast = Parallel(ours.next, compile=compile)
    for _ in range(3):
        assert torch.allclose(fast(), theirs.next(), rtol=1e-6)
        assert torch.equal(ours.position, theirs.position)
    with pytest.raises(IndexError, match="out of range"):
        fast()


# Objects


def test_an_attribute_of_the_model_is_asked_of_the_model() -> None:
    fast = mh.parallel(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"Linear has it: keep Linear .* or write \.function\.parameters"):
        fast.parameters()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'Parallel' object has no attribute 'parametres'"):
        fast.parametres()  # type: ignore[attr-defined]


def test_an_object_may_have_a_shape_of_any_kind() -> None:
    class Box:
        shape = [1, 2]  # noqa: RUF012 - not hashable

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    for value in (Box(), Refusing()):
        assert mh.parallel(lambda x, y: x + 1)(torch.ones(2), value).tolist() == [2, 2]


@mh.parallel
def bare(x: torch.Tensor) -> torch.Tensor:
    """It multiplies."""
    return (x @ x).sin() + (x @ x.t()).cos()


@mh.parallel(memory=2.0, synchronous=True)
def with_options(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin() + (x @ x.t()).cos()


class Scale:
    factor = 2.0

    @mh.parallel(synchronous=True)
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_decorated_function_keeps_its_results_options_name_and_text() -> None:
    for fast in (bare, with_options):
        for _ in range(2):
            assert torch.equal(fast(X), fast.function(X))
        assert "tasks" in fast.explain()
    assert (with_options.memory, with_options.synchronous) == (2.0, True)
    assert (bare.__name__, bare.__doc__) == ("bare", "It multiplies.")
    assert pickle.loads(pickle.dumps(bare)) is bare


def test_methods_are_bound_to_their_objects() -> None:
    one, other = Scale(), Scale()
    for other.factor in (3.0, 4.0):
        for scale in (one, other):
            assert torch.equal(scale.scaled(X), X * scale.factor)
    assert "synchronous" in Scale.scaled.explain()
    assert pickle.loads(pickle.dumps(Scale.scaled)) is Scale.scaled


def test_a_copy_has_the_function_and_its_options() -> None:
    fast = Parallel(function, synchronous=True, dynamic=False, memory=2.0)
    fast(X)
    for other in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        assert other.function is function
        assert (other.synchronous, other.dynamic, other.memory) == (True, False, 2.0)
        assert torch.equal(other(X), function(X))


# Failing runs


ERRORS: list[Exception] = []  # what the next calls of the operation below raise
CALLS: list[str] = []
OUT_OF_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried 1 byte")


@torch.library.custom_op("manyhands_tests::breaks", mutates_args=())
def breaks(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(threading.current_thread().name)
    if ERRORS:
        raise ERRORS.pop(0)
    return x + 1


breaks.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def _no_errors_left() -> Iterator[None]:
    yield
    ERRORS.clear()


def test_results_without_memory_fall_back_to_plain_execution_and_it_says_so() -> None:
    fast = planned(lambda x, y: breaks(x) + breaks(y))
    fast(torch.ones(2), torch.ones(2))
    ERRORS.append(NoMemoryForResults("none left"))
    assert fast(torch.ones(2), torch.ones(2)).tolist() == [4, 4]
    assert not ERRORS
    assert "ran out of memory: plain execution is used instead" in fast.explain()
    CALLS.clear()
    fast(torch.ones(2), torch.ones(2))
    assert set(CALLS) == {threading.current_thread().name}


def test_a_run_that_failed_is_not_repeated() -> None:
    total = torch.zeros(2)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return breaks(x)

    fast = planned(function)
    fast(torch.ones(2))
    ERRORS.append(ArithmeticError("on purpose"))
    with pytest.raises(ArithmeticError, match="on purpose"):
        fast(torch.ones(2))


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyError("of ours"), "KeyError: 'of ours'"), (OUT_OF_MEMORY, "can't allocate memory")],
    ids=["error", "memory"],
)
def test_what_fails_while_plans_are_tried_is_noted(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(trials, "in_turns", broken)
    fast = mh.parallel(lambda x: x + 1)
    assert fast(torch.ones(2)).tolist() == [2, 2]
    assert "it could not be planned: " in fast.explain()
    assert words in fast.explain()


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


def test_runs_that_lost_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold the memory of a CUDA graph."""
    runs: list[weakref.ref[Any]] = []
    made = planning.thread_run

    def noted(*arguments: Any) -> Any:
        run = made(*arguments)
        runs.append(weakref.ref(run))
        return run

    monkeypatch.setattr(planning, "thread_run", noted)
    monkeypatch.setattr(trials, "_CLEARLY", {True: 0.0})  # plain execution is kept
    fast = Parallel(lambda x: (x @ x).sin() + (x @ x.T).cos())
    fast(torch.rand(8, 8))
    gc.collect()
    assert runs
    assert [run() for run in runs] == [None] * len(runs)


@pytest.mark.parametrize("options", [{}, {"synchronous": True}, {"pure": True}])
def test_a_function_is_let_go_with_all_that_it_captured(options: dict[str, Any]) -> None:
    net = torch.nn.Linear(4, 4).requires_grad_(False)
    fast = Parallel(net, **options)
    fast(torch.ones(2, 4))
    kept = [weakref.ref(one) for one in (net, net.weight, fast, fast._graphs)]
    del net, fast
    gc.collect()
    assert [one() for one in kept] == [None] * 4
