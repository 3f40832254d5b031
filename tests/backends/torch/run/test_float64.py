"""Traces in float64: as if the function were written with wider numbers; and what is asked of compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from manyhands import torch as mh
from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture import call as torch_call
from manyhands.backends.torch.capture.facts import written_values
from manyhands.backends.torch.passes import regions
from manyhands.backends.torch.run import float64
from manyhands.backends.torch.run.codegen import Plan
from manyhands.errors import CannotBeExact
from manyhands.parallel.choose.equality import Judge

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)
BATCH = torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    call = torch_call.call(arguments, {})
    return torch_call.trace(function, call), call


def exactly(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Of a trace as it is, with what it writes to behind its results."""
    trace, call = traced(function, *arguments)
    return float64.exact(trace, call.tensors, written_values(trace, call.tensors))


def net() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4)]
    return nn.Sequential(*body, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def step_of(model: nn.Module, cast: bool) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            answer = model(x)
        loss = nn.functional.cross_entropy(answer.float() if cast else answer, y)
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    return step


def assert_all_close(found: list[Any], wanted: list[Any]) -> None:
    for result, other in zip(found, wanted, strict=True):
        assert result.dtype == other.dtype
        assert result.shape == other.shape
        torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_a_training_step_is_that_of_a_net_of_doubles(cast: bool, last: bool) -> None:
    """Convolutions, batch normalisation and its statistics, autocast, softmax: all as if it were written in float64."""
    model, (x, y) = net(), BATCH
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    wide, before = copy.deepcopy(model).double(), copy.deepcopy(model.state_dict())
    result = exactly(step_of(model, cast), x, y)
    wanted = [*step_of(wide, False)(x.double(), y)]
    assert_all_close(result[: len(wanted)], wanted)
    assert_all_close(sorted(result[len(wanted) :], key=_key), sorted(wide.buffers(), key=_key))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def _key(tensor: Any) -> float:
    return float(tensor.double().sum())


def test_results_come_in_the_order_in_which_plain_executions_do() -> None:
    """Results, gradients in ``.grad``, what is written to."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(*BATCH)
    trace, call = traced(step, *BATCH)
    fused = regions.fuse(trace, lambda module, metas: module)
    plain = backend.expected(fused, call, lambda _, arguments, keywords: step(*arguments))
    wide = backend.exact(fused, call)
    assert len(plain) > 2 * len(list(model.parameters()))
    for value, other in zip(wide, plain, strict=True):
        torch.testing.assert_close(value, other.to(value.dtype), rtol=1e-3, atol=1e-5)


def test_views_and_writes_are_to_copies() -> None:
    base = torch.rand(3, 4)
    first, second = base[:, 1:], base.t()  # one memory

    def function(x: Any) -> Any:
        y = x @ x
        y[0].fill_(0.1)
        z = y.t()
        z.mul_(2)
        x.add_(1)
        first.add_(y[:3, :3].sum())
        return y + x, z @ x, second.sum(0), torch.as_strided(x, (2, 2), (1, 3), 1) * 2

    x, state = torch.rand(4, 4), base.clone()
    mine = x.clone()
    result = exactly(function, mine)
    assert torch.equal(mine, x)
    assert torch.equal(base, state)
    base, wide = base.double(), x.double()
    first, second = base[:, 1:], base.t()
    wanted = [*function(wide), wide]
    assert_all_close(result[:5], wanted)
    assert any(result.shape == first.shape and torch.allclose(result, first, rtol=1e-12) for result in result[5:])


def test_types_that_operations_name() -> None:
    def function(x: Any, index: Any) -> Any:
        half = x.to(torch.float16).to(torch.bfloat16)
        numbers = torch.arange(3, dtype=torch.float32) / 3 + torch.zeros(3)
        return (
            half.sum(dtype=torch.float32),
            half.softmax(0, dtype=torch.float32),
            half.log_softmax(0),
            numbers,
            index / 3,
            index * 0.1,
            torch.full((2,), 0.1),
            index + 1,
            (half > 0.5).to(torch.int32),
            nn.functional.embedding(index, x.reshape(3, 2)),
            nn.functional.nll_loss(x.reshape(3, 2).log_softmax(1), index % 2, weight=torch.full((2,), 0.3)),
        )

    x, index = torch.rand(6), torch.tensor([0, 2, 1])
    result = exactly(function, x, index)
    wide, third = x.double(), torch.arange(3, dtype=torch.float64) / 3
    loss = nn.functional.nll_loss(wide.reshape(3, 2).log_softmax(1), index % 2)
    weighted = nn.functional.nll_loss(
        wide.reshape(3, 2).log_softmax(1), index % 2, weight=torch.full((2,), 0.3, dtype=torch.float64)
    )
    assert torch.allclose(loss, weighted)
    wanted = [
        wide.sum(), wide.softmax(0), wide.log_softmax(0), third, index.double() / 3, index.double() * 0.1,
        torch.full((2,), 0.1, dtype=torch.float64), index + 1, (wide > 0.5).int(), wide.reshape(3, 2)[index], weighted,
    ]  # fmt: skip
    assert_all_close(result, wanted)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.dropout(x, 0.5, True), "draws random numbers"),
        (lambda x: x.view(torch.int32) + 1, "how numbers are stored"),
        (lambda x: x.double() * 2, None),
        (lambda x: torch.nextafter(x, x + 1), "how numbers are stored"),
    ],
)
def test_what_cannot_be_done_says_why(function: Callable[..., Any], words: str | None) -> None:
    if words is None:
        assert exactly(function, torch.rand(3))[0].dtype is torch.float64
        return
    with pytest.raises(CannotBeExact, match=words):
        exactly(function, torch.rand(3))


def test_float64_is_exact_already() -> None:
    with pytest.raises(CannotBeExact, match="float64 already"):
        exactly(lambda x: x @ x, torch.rand(3, 3).double())


# What is asked of compiled code


def compiler(change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[..., Any]:
    """One that rounds only at the ends of its regions, and gives what ``change`` makes of each matrix."""

    def compiled(module: GraphModule, metas: Any) -> Callable[..., Any]:
        graph = Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in graph.nodes:
            node.kwargs = {key: float64._wide_type(value) for key, value in node.kwargs.items()}
        wide = GraphModule(module, graph)

        def run(*arguments: Any) -> Any:
            results = wide(*(value.double() if value.is_floating_point() else value for value in arguments))
            if change is not None:
                results = [change(result) if result.dim() > 1 else result for result in results]
            # As PyTorch has them: statistics of half numbers are float32, whatever a trace says of them.
            return tuple(result.to(plain.dtype) for result, plain in zip(results, module(*arguments), strict=True))

        return run

    return compiled


def verdict(change: Callable[[torch.Tensor], torch.Tensor] | None, cast: bool) -> tuple[str | None, str]:
    step = step_of(net(), cast)
    trace, call = traced(step, *BATCH)
    fused = regions.fuse(trace, compiler(change))
    plain = backend.expected(fused, call, lambda _, arguments, keywords: step(*arguments))
    count = len(fused.steps)
    run = backend.thread_run(fused, Plan(["cpu"], [0] * count, list(range(count)), {}), 1)
    notes: list[str] = []
    result = Judge(backend, fused, call, plain, notes).refused(backend.observed(fused, call, run))
    assert not notes
    return result


@pytest.mark.parametrize("cast", [False, True])
def test_other_rounding_is_accepted(cast: bool) -> None:
    refused, words = verdict(None, cast)
    assert refused is None
    assert str(words).startswith("as exact as plain execution (")


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "off by a hundredth": lambda one: one * 1.01,
    "samples mixed up": lambda one: one.flip(0),
    "nothing": torch.zeros_like,
    "no numbers": lambda one: one / 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str) -> None:
    refused, _ = verdict(WRONG[name], cast=False)
    assert refused is not None
    words = "different where it must be equal" if name == "no numbers" else "times as far from exact results as plain"
    assert words in refused


@pytest.mark.parametrize("name", ["samples mixed up", "nothing", "no numbers"])
def test_what_is_wrong_is_refused_in_bfloat16(name: str) -> None:
    assert verdict(WRONG[name], cast=True)[0] is not None


def test_without_exact_results_the_difference_to_plain_execution_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "inductor", compiler(None))

    def function(x: Any) -> Any:
        return torch.dropout(x @ x, 0.5, True), (x @ x).sin().cos() + 1

    fast = mh.parallel(function, compile=True)
    fast(torch.rand(32, 32))
    assert "draws random numbers: other dtypes would draw different ones" in fast.explain()
    assert "fused, one lane " in fast.explain()


def test_compiled_code_that_breaks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(module: Any, metas: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            raise RuntimeError("a type that nobody takes")

        return run

    monkeypatch.setattr(regions, "inductor", breaking)
    x = torch.rand(8, 8)
    fast = mh.parallel(lambda x: (x @ x).sin().cos(), compile=True)
    assert torch.equal(fast(x), (x @ x).sin().cos())
    assert "one lane is not used: RuntimeError: a type that nobody takes" in fast.explain()


def test_exact_results_are_computed_once_and_only_if_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    whole = backend.exact

    def counted(*arguments: Any) -> Any:
        asked.append(1)
        return whole(*arguments)

    monkeypatch.setattr(backend, "exact", counted)
    x = torch.rand(32, 32)

    def function(x: Any) -> Any:
        return [((x @ x) * number).sin().cos() + 1 for number in range(3)]

    for made, count in ((lambda module, metas: module, 0), (compiler(None), 1)):
        monkeypatch.setattr(regions, "inductor", made)
        asked.clear()
        fast = mh.parallel(function, compile=True)
        fast(x)
        assert len(asked) == count, fast.explain()


def test_torch_compile_asks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward graph of ``torch.compile(backend="manyhands")``: each with exact results of its own."""
    verdicts: list[tuple[Judge, Any]] = []  # one judge for each graph
    whole = Judge.refused

    def watched(self: Judge, results: Any) -> Any:
        verdicts.append((self, whole(self, results)))
        return verdicts[-1][1]

    monkeypatch.setattr(Judge, "refused", watched)
    monkeypatch.setattr(regions, "inductor", compiler(None))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    fast = torch.compile(model, backend=mh.compile_backend)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            answer = fast(torch.rand(6, 8))
        answer.float().square().sum().backward()
    torch._dynamo.reset()
    accepted = {id(judge) for judge, (refused, how) in verdicts if refused is None and "as exact as" in str(how)}
    assert len(accepted) == 2, verdicts


# How results are compared


def test_leaps_are_looked_for() -> None:
    x = torch.rand(4, 4, requires_grad=True)

    def relu(x: Any) -> Any:
        return torch.autograd.grad((x @ x).relu().sum(), x)

    def gelu(x: Any) -> Any:
        return torch.autograd.grad(nn.functional.gelu(x @ x).sum(), x)

    assert float64.has_jumps(traced(relu, x)[0])
    assert not float64.has_jumps(traced(gelu, x)[0])


def test_whole_numbers_that_plain_execution_has_right_have_to_be_right() -> None:
    count, other = torch.tensor([1000000]), torch.tensor([1000001])
    assert float64.verdict([count], [count], [count], 1e-7).accepted
    assert not float64.verdict([other], [count], [count], 1e-7).accepted


def test_infinities_have_to_be_in_the_same_places() -> None:
    inf, nan = float("inf"), float("nan")
    plain, exact = torch.tensor([1.0, inf, nan]), torch.tensor([1.0, 1e300, nan], dtype=torch.float64)
    (same,) = float64.distances([plain.clone()], [plain], [exact], 0.0)
    assert (same.planned, same.plain) == (0.0, 0.0)
    for other in ([1.0, -inf, nan], [1.0, inf, 2.0], [1.0, nan, inf], [nan, inf, nan]):
        assert not float64.verdict([torch.tensor(other)], [plain], [exact], 0.0).accepted
