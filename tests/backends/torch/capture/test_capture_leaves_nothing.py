"""Planning leaves nothing behind: what a function writes while it is traced is made-up, and nobody gets to see it."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.backends.torch import planning
from manyhands.parallel.function import Parallel

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def planned(function: Callable[..., Any]) -> Parallel:
    """With the traced code always used where there is one, in the caller's thread."""
    return Parallel(function, planning, synchronous=True)


# Tensors that get other memory


def assigns(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weight.data = weight.data * 0.5 + x.sum(0)
    return x * weight.data


def subtracts(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weight.data -= x.sum(0)  # assigns, too
    return x * weight.data


def sets(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight.set_(x.sum(0))
    return x * weight.detach()


@pytest.mark.parametrize("way", [assigns, subtracts, sets])
def test_a_weight_that_gets_other_memory_keeps_its_numbers(way: Callable[..., Any]) -> None:
    own, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    fast = planned(lambda x: way(own, x))
    for number in range(3):
        assert torch.equal(fast(X + number), way(plain, X + number))
        assert torch.equal(own, plain)
    assert "copy_" in fast.explain()


@pytest.mark.parametrize("change", [torch.Tensor.t_, lambda x: x.unsqueeze_(0), lambda x: x.swapaxes_(0, 1)])
def test_an_argument_that_changes_its_shape_does_so_once(change: Callable[..., Any]) -> None:
    """Trying plans would change it again and again."""

    def function(x: torch.Tensor) -> torch.Tensor:
        change(x)
        return x * 2 + torch.arange(x.shape[-1])

    fast = Parallel(function, planning)
    for number in range(3):
        own, plain = torch.rand(3, 4) + number, torch.empty(3, 4)
        plain.copy_(own)
        assert torch.equal(fast(own), function(plain))
        assert (own.shape, own.stride()) == (plain.shape, plain.stride())
        assert torch.equal(own, plain)


def test_an_argument_that_gets_other_memory_has_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.data = x * 2
        return x + 1

    fast = planned(function)
    for _ in range(2):
        x = X.clone()
        assert torch.equal(fast(x), X * 2 + 1)
        assert torch.equal(x, X * 2)


def test_a_layer_without_a_form_is_planned_when_it_has_one() -> None:
    layer = nn.LazyLinear(3)
    fast = planned(torch.no_grad()(lambda x: layer(x)))
    for _ in range(3):
        assert torch.equal(fast(X), layer(X))
    assert "synchronous" in fast.explain()


# Lists and dicts that are arguments


def appends(batch: dict[str, Any]) -> torch.Tensor:
    batch["log"].append(batch["x"].sum())
    return batch["x"] * 2


def adds(batch: dict[str, Any]) -> torch.Tensor:
    batch["y"] = batch["x"] + 1
    return batch["y"] * 2


def takes_out(batch: dict[str, Any]) -> torch.Tensor:
    return batch.pop("x") * 2  # type: ignore[no-any-return]


def replaces(batch: dict[str, Any]) -> torch.Tensor:
    batch["x"] = batch["x"] * 2
    return batch["x"] + 1


@pytest.mark.parametrize("way", [appends, adds, takes_out, replaces])
def test_what_is_put_into_an_argument_is_there(way: Callable[..., Any]) -> None:
    fast = planned(way)
    for number in range(3):
        own, plain = {"x": X + number, "log": []}, {"x": X + number, "log": []}
        assert torch.equal(fast(own), way(plain))
        assert own.keys() == plain.keys()
        for one, other in zip(own["log"], plain["log"], strict=True):  # type: ignore[arg-type]
            assert torch.equal(one, other)
        if "x" in plain:
            assert torch.equal(own["x"], plain["x"])  # type: ignore[arg-type]
    assert "a list or dict that it was passed" in fast.explain()


# What a function asks of tensors, and what its results are


def test_results_that_are_to_get_gradients() -> None:
    for way in (lambda x: (x * 2).requires_grad_(), lambda x: nn.Parameter(x * 2, requires_grad=False)):
        fast = planned(way)
        for _ in range(2):
            own, plain = fast(X), way(X)
            assert torch.equal(own, plain)
            assert (type(own), own.requires_grad) == (type(plain), plain.requires_grad)


def test_texts_have_numbers_in_them() -> None:
    for way in (lambda x: (x + 1, str(x.sum())), lambda x: (x + 1, f"{x.sum()}"), lambda x: (x + 1, f"{x.sum():.3f}")):
        fast = planned(way)
        for number in range(3):
            assert fast(X + number)[1] == way(X + number)[1]


def test_a_tensor_may_begin_elsewhere_in_its_memory() -> None:
    numbers = torch.arange(40.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 1), x.storage_offset() + 1) * 1

    fast = planned(function)
    for start in (0, 3, 6):
        assert torch.equal(fast(numbers[start : start + 9]), function(numbers[start : start + 9]))


def test_a_parameter_is_a_parameter_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.detach() * (2 if isinstance(x, nn.Parameter) else 3)

    fast = planned(function)
    for x in (nn.Parameter(X), X, nn.Parameter(X)):
        assert torch.equal(fast(x), function(x))
    assert "synchronous" in fast.explain()


# Settings of PyTorch


@pytest.mark.parametrize("way", [lambda: torch.set_grad_enabled(False), lambda: torch.set_num_threads(1)])
def test_a_setting_that_lasts_is_made_at_every_call(way: Callable[[], Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        way()
        return x.detach() * 2

    fast, threads = planned(function), torch.get_num_threads()
    for _ in range(3):
        torch.set_num_threads(2)
        with torch.enable_grad():
            fast(X)
            assert not torch.is_grad_enabled() or torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    assert "a setting of PyTorch" in fast.explain()


def test_anomalies_are_found() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y.sqrt() * 0).sum(), y)[0]

    fast = planned(function)
    for _ in range(2):
        fast(torch.zeros(3))
    with (
        pytest.warns(UserWarning, match="nomaly|Error detected"),
        pytest.raises(RuntimeError, match="nan"),
        torch.autograd.detect_anomaly(),
    ):
        fast(torch.zeros(3))


# What a function makes outside itself


class Slotted:
    __slots__ = ("last",)


def places() -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """For each a function that leaves a sum somewhere, where nothing was, and what is there."""
    names: dict[str, Any] = {"__name__": "of_the_user"}
    exec("def function(x):\n    global last\n    last = x.sum()\n    return x * 2", names)
    kind, module, slotted, tensor = type("Kind", (), {}), types.ModuleType("notes"), Slotted(), torch.ones(4)

    def leaves_in(holder: Any) -> tuple[Callable[..., Any], Callable[[], Any]]:
        def function(x: torch.Tensor) -> torch.Tensor:
            holder.last = x.sum()
            return x * 2

        return function, lambda: getattr(holder, "last", None)

    def leaves_in_a_closure() -> tuple[Callable[..., Any], Callable[[], Any]]:
        def function(x: torch.Tensor) -> torch.Tensor:
            nonlocal last
            last = x.sum()
            return x * 2

        def look() -> Any:
            return last

        if X is None:  # it is bound in this function, but to nothing
            last = None
        return function, look

    return {
        "a global": (names["function"], lambda: names.get("last")),
        "a class": leaves_in(kind),
        "a module": leaves_in(module),
        "a slot": leaves_in(slotted),
        "a tensor": leaves_in(tensor),
        "a closure": leaves_in_a_closure(),
    }


@pytest.mark.parametrize("name", places())
def test_what_is_made_outside_is_made_at_every_call(name: str) -> None:
    function, look = places()[name]
    fast = planned(function)
    for number in range(3):
        assert torch.equal(fast(X + number), function(X + number))
        fast(X + number)
        assert type(look()) is torch.Tensor
        assert torch.equal(look(), (X + number).sum())
    assert "last" in fast.explain()


def test_numbers_that_a_tensor_carries_are_seen() -> None:
    weight: Any = torch.ones(4)
    weight.scale = 2.0
    fast = planned(lambda x: x * weight * weight.scale)
    for weight.scale in (2.0, 2.0, 3.0):
        assert torch.equal(fast(X), X * weight.scale)
    assert "synchronous" in fast.explain()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angles: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.angles is None or len(self.angles) < len(x):
            self.angles = torch.arange(float(len(x)))[:, None]
        return x * self.angles[: len(x)].sin()

    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(4.0)


def test_what_is_made_at_the_first_call_is_planned_at_the_second() -> None:
    masks: dict[int, torch.Tensor] = {}
    rotated = Rotated()

    def masked(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in masks:
            masks[len(x)] = torch.tril(torch.ones(len(x), len(x)))
        return x * masks[len(x)]

    for function in (masked, rotated, lambda x: x * rotated.table):
        fast = planned(function)
        for number in range(3):
            assert torch.equal(fast(X + number), function(X + number))
        assert "synchronous" in fast.explain()


def test_a_cache_never_holds_what_is_made_up() -> None:
    @functools.lru_cache
    def mask(size: int) -> torch.Tensor:
        return torch.tril(torch.ones(size, size))

    fast = planned(lambda x: x * mask(len(x)))
    for _ in range(3):
        assert torch.equal(fast(X), X.tril())
        assert type(mask(4)) is torch.Tensor
    assert "synchronous" in fast.explain()


def test_a_plan_keeps_nothing_alive_that_it_does_not_use() -> None:
    names: dict[str, Any] = {"__name__": "of_the_user", "other": torch.ones(3)}
    exec("def function(x):\n    return x * 2", names)
    gone = weakref.ref(names["other"])
    fast = planned(names["function"])
    for _ in range(2):
        fast(X)
    del names["other"]
    assert gone() is None
