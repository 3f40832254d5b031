"""What a planned function reaches through classes, methods and attributes of functions, and what nobody can watch."""

from __future__ import annotations

import collections
import contextvars
import io
import itertools
import os
import random
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402

FACTOR = [2.0]
Made = tuple[Callable[[Any], Any], Callable[[], object]]


class Scaled(torch.nn.Module):
    """Its forward pass asks a method, which asks a global."""

    def scale(self) -> float:
        return FACTOR[0]

    def forward(self, x: Any) -> Any:
        return x * self.scale()


def through_a_module() -> Made:
    return Scaled(), lambda: FACTOR.__setitem__(0, FACTOR[0] + 1)


def through_a_method_of_the_class() -> Made:
    class Settings:
        value = 2.0

        @classmethod
        def factor(cls) -> float:
            return cls.value

    return lambda x: x * Settings.factor(), lambda: setattr(Settings, "value", 5.0)


def through_a_static_method() -> Made:
    factors = [2.0]

    class Settings:
        @staticmethod
        def factor() -> float:
            return factors[0]

    one = Settings()
    return lambda x: x * one.factor(), lambda: factors.__setitem__(0, 5.0)


def through_a_property() -> Made:
    factors = [2.0]

    class Settings:
        @property
        def factor(self) -> float:
            return factors[0]

    one = Settings()
    return lambda x: x * one.factor, lambda: factors.__setitem__(0, 5.0)


def by_another_method() -> Made:
    class Settings:
        def factor(self) -> float:
            return 2.0

    one = Settings()
    return lambda x: x * one.factor(), lambda: setattr(Settings, "factor", lambda self: 5.0)


def in_a_dict_of_the_class() -> Made:
    class Settings:
        factors: ClassVar = {"one": [2.0]}

    return lambda x: x * Settings.factors["one"][0], lambda: Settings.factors["one"].__setitem__(0, 5.0)


def in_a_tensor_of_the_class() -> Made:
    class Settings:
        factor = torch.tensor(2.0)

    return lambda x: x * Settings.factor, lambda: setattr(Settings, "factor", torch.tensor(5.0))


def by_another_forward_pass() -> Made:
    layer: Any = torch.nn.Linear(4, 4).requires_grad_(False)
    return lambda x: layer(x), lambda: setattr(layer, "forward", lambda x: x * 5)


def in_a_context_variable() -> Made:
    factor = contextvars.ContextVar("factor", default=2.0)
    return lambda x: x * factor.get(), lambda: factor.set(5.0)


def in_a_list_of_a_context_variable() -> Made:
    factor: contextvars.ContextVar[list[float]] = contextvars.ContextVar("factor")
    factor.set([2.0])
    return lambda x: x * factor.get()[0], lambda: factor.get().__setitem__(0, 5.0)


def behind_a_read_only_view() -> Made:
    factors = {"factor": 2.0}
    view = types.MappingProxyType(factors)
    return lambda x: x * view["factor"], lambda: factors.__setitem__("factor", 5.0)


def in_the_environment() -> Made:
    os.environ["MANYHANDS_TEST_FACTOR"] = "2.0"
    return (
        lambda x: x * float(os.environ["MANYHANDS_TEST_FACTOR"]),
        lambda: os.environ.__setitem__("MANYHANDS_TEST_FACTOR", "5.0"),
    )


def in_a_variable_that_the_environment_lacks() -> Made:
    os.environ.pop("MANYHANDS_TEST_FACTOR", None)
    return (
        lambda x: x * float(os.getenv("MANYHANDS_TEST_FACTOR", "2.0")),
        lambda: os.environ.__setitem__("MANYHANDS_TEST_FACTOR", "5.0"),
    )


class Building(dict[str, Any]):
    """A dict of classes that gives a new object each time it is asked."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def in_a_dict_that_builds_its_values() -> Made:
    activations = Building(one=torch.nn.ReLU)
    return lambda x: activations["one"](x), lambda: activations.__setitem__("one", torch.nn.Tanh)


@pytest.mark.parametrize(
    "make",
    [
        through_a_module,
        through_a_method_of_the_class,
        through_a_static_method,
        through_a_property,
        by_another_method,
        in_a_dict_of_the_class,
        in_a_tensor_of_the_class,
        by_another_forward_pass,
        in_a_context_variable,
        in_a_list_of_a_context_variable,
        behind_a_read_only_view,
        in_the_environment,
        in_a_variable_that_the_environment_lacks,
        in_a_dict_that_builds_its_values,
    ],
    ids=lambda make: make.__name__,
)
def test_what_changes_between_calls_is_noticed(make: Callable[[], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_TEST_FACTOR", "1.0")  # and put back after the test
    function, change = make()
    fast = Parallel(function, planning, synchronous=True)  # a plan is always used
    x = torch.randn(4, 4)
    fast(x)
    assert torch.equal(fast(x), function(x))
    assert "schedule's order" in fast.explain()
    change()
    assert torch.equal(fast(x), function(x))


def test_a_hook_of_all_modules_is_noticed() -> None:
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    fast = Parallel(lambda x: layer(x), planning, synchronous=True)
    x = torch.randn(4, 4)
    fast(x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, result: result * 5)
    try:
        assert torch.equal(fast(x), layer(x))
    finally:
        handle.remove()
    assert torch.equal(fast(x), layer(x))


def test_a_method_with_effects_is_run_as_it_is() -> None:
    log: list[float] = []

    class Noting(torch.nn.Module):
        def note(self) -> None:
            log.append(1.0)

        def forward(self, x: Any) -> Any:
            self.note()
            return x * 2

    fast = Parallel(Noting(), planning)
    for _ in range(5):
        fast(torch.ones(4))
    assert len(log) == 5
    assert "which is outside it" in fast.explain()


def test_an_attribute_of_the_function_itself() -> None:
    def counting(x: Any) -> Any:
        counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * counting.calls  # type: ignore[attr-defined]

    fast = Parallel(counting, planning)
    assert [float(fast(torch.ones(()))) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("what", "take", "words"),
    [
        (iter(range(1000)), next, "an iterator"),
        (itertools.count(), next, "an iterator"),
        (random.Random(0), lambda one: one.random(), "random numbers"),
        (numpy.random.default_rng(0), lambda one: one.random(), "random numbers"),
        (io.StringIO(), lambda one: one.write("x"), "an iterator"),  # of lines
        (collections.ChainMap({"one": 1.0}), lambda one: one["one"], "a ChainMap"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_watched_is_not_tried_out(what: Any, take: Callable[[Any], float], words: str) -> None:
    taken = []

    def function(x: Any) -> Any:
        taken.append(1)
        return x * float(take(what))

    fast = Parallel(function, planning)
    for _ in range(3):
        fast(torch.ones(4))
    assert len(taken) == 3
    assert words in fast.explain()


def test_a_function_that_sets_a_context_variable_is_run_as_it_is() -> None:
    count = contextvars.ContextVar("count", default=0)

    def counting(x: Any) -> Any:
        count.set(count.get() + 1)
        return x * count.get()

    fast = Parallel(counting, planning)
    assert [float(fast(torch.ones(()))) for _ in range(4)] == [1, 2, 3, 4]
    assert "it changes count" in fast.explain()


def test_a_context_variable_that_is_set_for_the_call_alone_is_planned() -> None:
    factor = contextvars.ContextVar("factor", default=0.0)

    def scaled(x: Any) -> Any:
        token = factor.set(2.0)
        try:
            return x * factor.get()
        finally:
            factor.reset(token)

    fast = Parallel(scaled, planning, synchronous=True)
    x = torch.randn(4)
    for _ in range(3):
        assert torch.equal(fast(x), x * 2)
    assert "schedule's order" in fast.explain()
    assert factor.get() == 0.0


def test_random_numbers_of_an_object_are_drawn_in_every_call() -> None:
    """In pieces, too: Dynamo by itself would give the same number in every call."""
    ours, plain = random.Random(0), random.Random(0)
    fast = Parallel(lambda x: (x.exp() + 1).log().tanh() * ours.random(), planning)
    x = torch.randn(300, 300)
    for _ in range(6):
        assert torch.equal(fast(x), (x.exp() + 1).log().tanh() * plain.random())
    assert "pieces" in fast.explain()
