"""From functions to tasks: memories, effects, gradients, and that tracing touches nothing of the caller's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from graph_cases import planned, traced  # noqa: E402
from schedule_cases import needed_before  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from manyhands.backends.torch.capture import trace  # noqa: E402
from manyhands.errors import CannotTrace, NotYet  # noqa: E402
from manyhands.schedule.graph import graph  # noqa: E402

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 0])


def task(found: trace.Trace, name: str) -> Any:
    return next(value for value in found.tasks if value.name == name)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


# Memories


def test_batch_normalisation_writes_its_running_statistics() -> None:
    layer = nn.BatchNorm1d(4)
    captured = traced(lambda x: layer(x).detach(), X)
    constants = {
        getattr(captured.module, str(node.target)).data_ptr(): captured.storages[node] for node in captured.constants
    }
    written = task(captured, "native_batch_norm").writes
    assert constants[layer.running_mean.data_ptr()] <= written  # type: ignore[union-attr]
    assert constants[layer.running_var.data_ptr()] <= written  # type: ignore[union-attr]
    assert constants[layer.num_batches_tracked.data_ptr()] <= task(captured, "add_").writes  # type: ignore[union-attr]
    layer.eval()  # then it only reads them
    captured = traced(lambda x: layer(x).detach(), X)
    assert not any(task(captured, "native_batch_norm").writes & captured.storages[node] for node in captured.constants)


def test_random_numbers_keep_their_order_even_if_nobody_takes_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x + torch.rand(3)

    captured = traced(function, torch.ones(3))
    assert [value.token for value in captured.tasks if value.name == "rand"] == ["random numbers of cpu"] * 2


def test_a_convolutions_backward_is_taken_apart() -> None:
    weight = torch.randn(2, 1, 3, 3, requires_grad=True)
    first = torch.randn(1, 1, 3, 3, requires_grad=True)

    def function(x: torch.Tensor) -> Any:
        y = nn.functional.conv2d(nn.functional.conv2d(x, first), weight)
        return torch.autograd.grad(y.square().sum(), [weight, first])

    x = torch.randn(1, 1, 8, 8)
    masks = [step.node.args[-1] for step in traced(function, x).steps if step.task.name == "convolution_backward"]
    assert [True, False, False] in masks
    assert [False, True, False] in masks
    for value, other in zip(planned(function)(x), function(x), strict=True):
        assert torch.equal(value, other)


# Tracing touches nothing


def everything(model: nn.Module) -> list[Any]:
    values = [value.clone() for value in model.state_dict().values()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*values, *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("before", [False, True], ids=["no gradients yet", "gradients from before"])
def test_tracing_touches_nothing_of_the_callers(before: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if before:
        step(X, Y)
    kept = [parameter.grad for parameter in model.parameters()]
    known, state = everything(model), copy.deepcopy(optimizer.state_dict())
    if before:
        traced(step, X, Y)
    else:
        with pytest.raises(NotYet, match="optimizer"):
            traced(step, X, Y)
    for value, other in zip(everything(model), known, strict=True):
        assert (value is None and other is None) or torch.equal(value, other)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), kept, strict=True))
    now = optimizer.state_dict()["state"]
    assert now.keys() == state["state"].keys()
    for number, entry in now.items():
        assert torch.equal(entry["momentum_buffer"], state["state"][number]["momentum_buffer"])


class _Twice(torch.autograd.Function):
    """Its parameter is seen only in the operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return None, gradient * ctx.saved_tensors[0] * 2


def test_gradients_through_an_own_function_are_noticed() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = _Twice.apply(x, weight).sum()
        loss.backward()
        return loss.detach()

    fast = planned(step)
    for number in (1, 2, 3):
        fast(torch.ones(3))
        assert torch.equal(weight.grad, torch.full((3,), 2.0 * number))
    assert "cannot be traced" not in fast.explain()


def test_a_failing_trace_leaves_no_made_up_gradient() -> None:
    model = nn.Linear(4, 2)

    def step(x: torch.Tensor) -> float:
        loss = model(x).sum()
        loss.backward()
        return loss.item()

    with pytest.raises(CannotTrace):
        traced(step, X)
    assert model.weight.grad is None
    assert planned(step)(X) == pytest.approx(float(model(X).sum().detach()))
    assert type(model.weight.grad) is torch.Tensor


# What is not traced, and why


TAKEN, WEIGHT = torch.ones(3), nn.Parameter(torch.ones(3))


def _catches(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * TAKEN.tolist()[0]
    except RuntimeError:
        return x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x, "one of the arguments"),
        (lambda x: x.view(-1), "shares its memory"),
        (lambda x: x.add_(1), "shares its memory"),
        (lambda x: TAKEN, "from outside"),
        (lambda x: x + 1 if x.sum() > 0 else x - 1, "needs a tensor's value"),
        (lambda x: x[x > 0], "depends on values"),
        (lambda x: x * TAKEN.sum().item(), "reads values"),
        (_catches, "reads values"),
        (lambda x: torch.autograd.grad((x * WEIGHT).norm(), WEIGHT, create_graph=True)[0], "computed later"),
    ],
)
def test_the_reason_is_told_and_plain_execution_used(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(CannotTrace, match=reason):
        traced(function, torch.ones(3))
    fast = planned(function)
    assert torch.equal(fast(torch.ones(3)), function(torch.ones(3)))
    # Pieces of it may be planned: what lies between them is Python's.
    assert re.search(r"cannot be traced|plain execution", fast.explain())


def test_arguments_that_share_memory_and_are_only_read_are_planned() -> None:
    tokens = torch.arange(12.0).reshape(3, 4)
    fast = planned(lambda x, y: (x * 2 - y).sum(1))
    for start in (0, 5):
        tokens += start
        assert torch.equal(fast(tokens[:, :-1], tokens[:, 1:]), (tokens[:, :-1] * 2 - tokens[:, 1:]).sum(1))
    assert "synchronous" in fast.explain()
    assert "share memory" not in fast.explain()
    apart = torch.ones(3, 3), torch.zeros(3, 3)
    assert torch.equal(fast(*apart), torch.full((3,), 6.0))


def test_a_gradient_that_would_go_into_an_argument_is_left_to_plain_execution() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().sum()
        loss.backward()
        return loss.detach()

    x = torch.ones(3, requires_grad=True)
    fast = planned(function)
    fast(x)
    fast(x)
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    assert "reaches an argument" in fast.explain() or ".grad" in fast.explain()


def test_users_of_parts_come_after_the_split() -> None:
    """A part of several views has no memory of its own: only the handle orders its users behind the split."""
    captured = traced(lambda x: [part * 2 for part in x.split(2)], torch.randn(6, 3))
    names = [step.task.name for step in captured.steps]
    needs = graph(captured.tasks).needs
    assert names.count("mul") == 3
    for number, name in enumerate(names):
        if name == "mul":
            assert names.index("split") in needs[number]


def test_two_users_of_one_weight_do_not_wait_for_each_other() -> None:
    """Each takes a view of it, which is no write; after an update of the weight they do wait."""
    layer = nn.Linear(4, 4)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            first, second = layer(x), layer(y)
            parts = [x * part for part in layer.weight.split(2)[0].unbind()]
            layer.weight.mul_(2)
            return first, second, *parts, layer(x)

    captured = traced(function, X, X + 1)
    names = [step.task.name for step in captured.steps]
    before = needed_before(graph(captured.tasks))
    products = [number for number, name in enumerate(names) if name == "addmm"]
    update = names.index("mul_")
    assert products[0] not in before[products[1]]
    assert set(products[:2]) <= before[update]
    assert {number for number, name in enumerate(names) if name == "mul"} <= before[update]
    assert update in before[products[2]]


def test_attention_without_dropout_draws_nothing() -> None:
    def attention(x: torch.Tensor, p: float) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)

    x = torch.rand(1, 2, 8, 4)
    assert not any(step.task.token for step in traced(lambda x: attention(x, 0.0), x).steps)
    assert any(step.task.token for step in traced(lambda x: attention(x, 0.5), x).steps)


class Repeated(nn.Module):
    """One layer, used three times."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.layer = inside, nn.Linear(16, 16)

    def step(self, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            for _ in range(3):
                x = self.layer(x).relu()
        return [*torch.autograd.grad(x.float().square().mean(), list(self.parameters()))]


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_casts_a_weight_once(inside: bool) -> None:
    """However often it is used, and so does a plan: its gradients would round elsewhere. No made-up cast is left."""
    torch.manual_seed(0)
    model, x = Repeated(inside), torch.randn(8, 16)
    fast = planned(model.step)
    with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert all(map(torch.equal, fast(x), model.step(x)))
        assert "synchronous" in fast.explain()
        assert type(model.layer(x)) is torch.Tensor
    if inside:  # autocast, too, forgets what is cast when its outermost scope ends
        with torch.no_grad():
            model.layer.weight.mul_(2)
        assert all(map(torch.equal, fast(x), model.step(x)))
