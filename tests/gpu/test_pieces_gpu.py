"""Functions that are not one graph, on a GPU: each piece is a CUDA graph of its own, with Python between them."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_compile_backend_gpu import DEVICE, PROGRAMS, Branchy, assert_same, batch  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.parallel import pieces as stages  # noqa: E402
from manyhands.parallel.way import IN_PIECES  # noqa: E402

nn = torch.nn
CALLS = 30  # until the ways are compared and one is chosen


@pytest.fixture(autouse=True)
def _whole_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    monkeypatch.setattr(stages, "_TOO_SHORT", 0.0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = before


def chain(x: Any) -> Any:
    for _ in range(60):
        x = (x * 1.01).sin() + x.cos() * 0.5
    return x


def looks_in_between(x: Any) -> Any:
    y = chain(x)
    print("is positive", y.mean().item() > 0)
    y = y + 1 if y.sum() > 0 else y - 1
    return chain(y)


def test_each_piece_is_a_graph_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Many small kernels: issuing them takes longer than running them, so that pieces win by far."""
    fast = mh.parallel(looks_in_between)
    kept = []
    for number in range(CALLS):
        x = torch.randn(64, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(number))
        result, expected = fast(x), looks_in_between(x)
        assert torch.equal(result, expected)
        kept.append((result, expected.clone()))
    printed = capsys.readouterr().out.splitlines()
    assert printed[::2] == printed[1::2]
    for result, expected in kept:  # results belong to the caller
        assert torch.equal(result, expected)
    assert fast.planned.way == IN_PIECES, fast.explain()
    assert fast.explain().count("one graph") >= 2, fast.explain()


def test_random_numbers_go_on_as_in_plain_execution() -> None:
    def drops(x: Any) -> Any:
        y = chain(nn.functional.dropout(x, 0.5))
        print("", end="")
        return chain(nn.functional.dropout(y, 0.5)) + torch.rand_like(y)

    fast, x = mh.parallel(drops), torch.randn(64, 64, device=DEVICE)
    for number in range(CALLS):
        results = []
        for call in (drops, fast):
            torch.cuda.manual_seed(number)
            results.append((call(x), torch.rand(4, device=DEVICE)))
        for value, other in zip(*results, strict=True):
            assert torch.equal(value, other)


def planned_nets() -> tuple[Any, Any, Callable[..., Any]]:
    """A net, its twin, and the twin in ``parallel``, trained until one way is chosen."""
    torch.manual_seed(0)
    plain = Branchy().to(DEVICE)
    twin = copy.deepcopy(plain)
    fast = mh.parallel(twin)
    for number in range(CALLS):
        for call in (plain, fast):
            call(batch(number)).square().mean().backward()
    return plain, twin, fast


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_in_any_order_of_passes(program: Callable[..., Any]) -> None:
    plain, twin, fast = planned_nets()
    explanation = fast.explain()
    assert "piece 1, forward" in explanation
    assert "piece 1, backward" in explanation
    for _ in range(2):
        for net, call in ((plain, plain), (twin, fast)):
            net.zero_grad()
            program(call)
        assert_same(plain, twin)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1)).to(DEVICE)
    fast = mh.parallel(net)
    start = torch.randn(4, 8, device=DEVICE)
    for number in range(CALLS):
        results = []
        for call in (net, fast):
            torch.cuda.manual_seed(number)
            net.zero_grad()
            x = start.clone().requires_grad_()
            (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
            # The last bias takes no part in it: its gradient is None, or zeros where a piece has computed it.
            grads = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for parameter in net.parameters()
            ]
            results.append([x.grad, *grads])
        for value, other in zip(*results, strict=True):
            torch.testing.assert_close(value, other)


def test_passes_from_some_results_and_passes_again() -> None:
    """A weight that a loss does not reach has no gradient; what has saved nothing can be gone through twice."""
    weights = [torch.ones(8, device=DEVICE, requires_grad=True) for _ in range(2)]

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        print("called")  # in pieces
        return (x + weights[0]).sum(), (x * weights[1]).sin().sum()

    fast, x = mh.parallel(both, synchronous=True), torch.randn(8, device=DEVICE)
    for number in (0, 1, 0, 1):
        results = []
        for call in (both, fast):
            weights[0].grad = weights[1].grad = None
            loss = call(x)[number]
            loss.backward()
            if number == 0:
                loss.backward()
            else:
                with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                    loss.backward()
            results.append([weight.grad for weight in weights])
        for value, other in zip(*results, strict=True):
            assert (value is None) == (other is None)
            assert value is None or torch.equal(value, other)


def test_a_whole_training_step_is_guarded_by_dynamo() -> None:
    settings = UserDict(scale=2.0)
    net = nn.Linear(8, 2).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean() * settings["scale"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast, x = mh.parallel(step, synchronous=True), torch.randn(4, 8, device=DEVICE)
    for number in range(6):
        assert torch.equal(fast(x), step(x))
        if number % 2:
            settings["scale"] += 1
    assert fast.planned.guards is not None
    assert not optimizer.param_groups[0].get("capturable", False)
