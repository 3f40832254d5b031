"""Training steps as they are written, and what a function takes from outside its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import randrange
from typing import Any, TypeVar, cast

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 0])


def planned(function: Callable[..., Any]) -> Parallel:
    """With the traced code always used, in the caller's thread: what it computes is what is looked at."""
    return Parallel(function, planning, synchronous=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


# Training steps


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "none": lambda parameters: None,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "momentum, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
}


def training_step(make: Callable[..., Any]) -> tuple[nn.Module, Any, Callable[..., Any]]:
    model = net()
    optimizer = make(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if optimizer is not None:
            optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return model, optimizer, step


MORE = [pytest.param(name, marks=pytest.mark.long) for name in ("SGD", "momentum", "Adam")]


@pytest.mark.parametrize("name", ["none", "momentum, foreach", "Adam, fused", *MORE])
def test_backward_and_optimizer_give_what_plain_steps_give(name: str) -> None:
    (plain, _, step), (model, _, ours) = training_step(OPTIMIZERS[name]), training_step(OPTIMIZERS[name])
    fast = planned(ours)
    for number in range(4):
        torch.manual_seed(number)
        expected = step(X, Y)
        torch.manual_seed(number)
        assert torch.equal(fast(X, Y), expected)
        for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.equal(one, other)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(one.grad) is torch.Tensor
            assert torch.equal(one.grad, other.grad)
    assert int(model[1].num_batches_tracked) == 4  # type: ignore[index]
    assert ("pieces, with Python between them" in fast.explain()) == (name == "Adam")
    if name == "Adam":
        assert "fused=True" in fast.explain()


def test_a_learning_rate_that_changes_is_noticed() -> None:
    (plain, theirs, step), (model, ours, mine) = training_step(OPTIMIZERS["SGD"]), training_step(OPTIMIZERS["SGD"])
    fast = planned(mine)
    for rate in (0.1, 0.1, 0.01, 0.1):
        for optimizer in (theirs, ours):
            optimizer.param_groups[0]["lr"] = rate
        torch.manual_seed(0)
        step(X, Y)
        torch.manual_seed(0)
        fast(X, Y)
        assert torch.equal(model[0].weight, plain[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("name", ["momentum, foreach", "Adam, fused", *MORE[:2]])
def test_an_optimizers_state_that_is_loaded_between_calls_is_used(name: str) -> None:
    (model, ours, step), (plain, theirs, plainly) = training_step(OPTIMIZERS[name]), training_step(OPTIMIZERS[name])
    fast = planned(step)

    def both(times: int) -> None:
        for _ in range(times):
            torch.manual_seed(1)
            expected = plainly(X, Y)
            torch.manual_seed(1)
            assert torch.equal(fast(X, Y), expected)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, other)

    both(2)
    kept = copy.deepcopy(theirs.state_dict())
    both(3)
    assert "synchronous" in fast.explain()
    kept["param_groups"][0]["lr"] = 0.01
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(kept))
    both(3)
    assert "synchronous" in fast.explain()


def test_what_changes_at_every_call_ends_in_plain_execution() -> None:
    scale = [0.0]

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * scale[0]

    fast = planned(function)
    for number in range(12):
        scale[0] = float(number)
        assert torch.equal(fast(X), X * number)
    assert "changes on every call (now: scale[0])" in fast.explain()


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.long)])
def test_recurrent_layers_are_trained(kind: Any) -> None:
    """An LSTM's backward pass on the CPU takes bytes that its forward pass notes: no made-up ones, and not without."""

    def make() -> tuple[nn.Module, Callable[..., Any]]:
        torch.manual_seed(0)
        model = kind(4, 4, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(x)[0].square().mean()
            loss.backward()
            return loss.detach()

        return model, step

    (plain, step), (model, ours) = make(), make()
    fast, batch = planned(ours), torch.randn(2, 3, 4)
    for number in range(3):
        torch.manual_seed(number)
        expected = step(batch)
        torch.manual_seed(number)
        assert torch.equal(fast(batch), expected)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert "synchronous" in fast.explain()


# What is taken from outside


def test_a_replaced_tensor_module_or_mode_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval().requires_grad_(False)
    extra = torch.ones(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x) + extra

    fast = planned(function)

    def same() -> bool:
        torch.manual_seed(3)
        expected = function(X)
        torch.manual_seed(3)
        return torch.equal(fast(X), expected)

    assert same()
    extra = torch.full((4,), 2.0)
    assert same()
    model.train()
    assert same()
    model[1].p = 0.1
    assert same()
    model[0].weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    assert same()
    model[0].weight.data = torch.ones(4, 4)
    assert same()
    model[0] = nn.Identity()
    assert same()
    extra.add_(1)  # the same tensor with other numbers needs no new plan
    assert same()


def test_modules_numbers_none_and_trees_are_arguments() -> None:
    def function(model: nn.Module, batch: dict[str, Any], scale: float = 2.0, *, shift: int | None = None) -> Any:
        y = model(batch["x"]) * scale
        return {"y": y if shift is None else y + shift, "parts": [batch["more"][0] + 1, None, "word"]}

    fast = planned(torch.no_grad()(function))
    batch = {"x": X, "more": (torch.ones(2),)}
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    for arguments, keywords in [
        ((first, batch), {}),
        ((second, batch), {}),
        ((first, batch, 3.0), {}),
        ((first, batch, 3), {"shift": 1}),
        ((first, batch), {"scale": 1.0, "shift": True}),
    ]:
        with torch.no_grad():
            expected = function(*arguments, **keywords)  # type: ignore[arg-type]
        found = fast(*arguments, **keywords)
        assert torch.equal(found["y"], expected["y"])
        assert torch.equal(found["parts"][0], expected["parts"][0])
        assert found["parts"][1:] == [None, "word"]


# Results


@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    second: int


def test_dataclasses_that_are_results() -> None:
    fast = planned(lambda x: {"pair": Pair(x + 1, 2), "more": [Pair(x.t() * 2, 3)], "shape": x.shape})
    for number in range(2):
        found = fast(X + number)
        assert torch.equal(found["pair"].first, X + number + 1)
        assert torch.equal(found["more"][0].first, (X + number).t() * 2)
        assert [type(found["pair"]), found["more"][0].second, type(found["shape"])] == [Pair, 3, torch.Size]
    assert "synchronous" in fast.explain()
    assert torch.equal(Parallel(lambda x: Pair(x.t() @ x, 2), planning)(X).first, X.t() @ X)  # compared, timed


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x[torch.tensor([2, 0])],
        lambda x: x[torch.arange(4), torch.tensor([1, 0, 3, 2])],
        lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
        lambda x: torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x),
        lambda x: torch.func.jacrev(lambda y: y.sin())(x),
    ],
    ids=["rows", "elements", "grad", "grad of each", "jacobian"],
)
def test_what_has_a_known_shape_is_planned(way: Callable[..., Any]) -> None:
    fast = planned(way)
    for number in range(3):
        assert torch.equal(fast(X + number), way(X + number))
    assert "synchronous" in fast.explain()


def test_a_method_of_random_numbers_is_named() -> None:
    fast = Parallel(lambda x: x * randrange(3), planning)
    fast(torch.ones(2))
    assert "it uses randrange, a source of random numbers" in fast.explain()


# Libraries that are used with several frameworks


Some = TypeVar("Some")
handlers: dict[type, Any] = {}
counts: dict[type, int] = {}


class Handler:
    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


def handler_for(x: Any) -> Handler:
    """Looked up once for each class of tensors; a stand-in has a class of its own."""
    if type(x) not in handlers:
        handlers[type(x)] = next(iter(handlers.values()), None) or Handler()
    return cast(Some, handlers[type(x)])  # type: ignore[valid-type]


def test_a_library_that_remembers_classes_of_tensors_is_planned() -> None:
    handlers.clear()
    fast = Parallel(lambda x: handler_for(x).transposed(x) * 2, planning, synchronous=True)
    x = torch.rand(3, 4)
    for _ in range(3):
        assert torch.equal(fast(x), x.t() * 2)
    assert "cannot be traced" not in fast.explain()
    assert set(handlers) == {torch.Tensor}


def test_a_count_by_class_is_no_such_library() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        counts[type(x)] = counts.get(type(x), 0) + 1
        return x * 2

    counts.clear()
    fast = Parallel(function, planning, synchronous=True)
    for _ in range(5):
        fast(torch.ones(3))
    assert counts == {torch.Tensor: 5}


def test_a_gradient_that_is_another_one_is_named_with_what_keeps_it() -> None:
    """Gradients added up over several calls, and then let go: the next ones are elsewhere."""
    weight = torch.ones(3, 3, requires_grad=True)
    fast = planned(lambda x: (x @ weight).sum().backward())
    for number in range(30):
        fast(torch.ones(2, 3))
        if number % 3 == 2:
            assert torch.equal(weight.grad, torch.full((3, 3), 6.0))  # type: ignore[arg-type]
            weight.grad = None
    assert "zero_grad(set_to_none=False) keeps it" in fast.explain()
