"""Automatic parallelism on a real GPU: the same bits as plain execution, and results that are the caller's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, Forced, assert_same, chains, each_run  # noqa: E402
from support import at_once  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402


@each_run
def test_chains_are_equal_to_the_bit_and_stay(lanes: int, kind: str) -> None:
    torch.manual_seed(0)
    w = torch.randn(128, 128, device=GPU) / 8
    fast = Forced(chains, lanes, kind)
    kept = []
    for _ in range(5):
        xs = [torch.randn(128, 128, device=GPU) for _ in range(8)]
        kept.append((fast(xs, w), chains(xs, w)))
    for ours, theirs in kept:  # the next calls have not touched them
        assert_same(ours, theirs)


@each_run
def test_attention_in_bfloat16_with_its_backward_pass(lanes: int, kind: str) -> None:
    """Products of batches end in views that do not say so: who takes one comes after it."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, device=GPU, dtype=torch.bfloat16) for _ in range(2)]

    def function(x: Any) -> Any:
        q, k = (layer(x) for layer in layers)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ k
        return torch.autograd.grad(y.float().square().mean(), [p for layer in layers for p in layer.parameters()])

    fast = Forced(function, lanes, kind)
    for _ in range(3):
        x = torch.randn(2, 4, 16, 32, device=GPU, dtype=torch.bfloat16)
        assert_same(fast(x), function(x))


def test_what_checks_values_on_a_gpu_is_run_as_it_is() -> None:
    fast = Parallel(lambda x: torch.linalg.cholesky(x) + 1, pure=True)
    good = torch.eye(4, device=GPU) * 2
    for _ in range(3):
        assert_same(fast(good), fast.function(good))
    assert "reads values on the host" in fast.explain()
    with pytest.raises(RuntimeError, match="not positive-definite"):
        fast(-good)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_probabilities_stay_probabilities_while_plans_are_tried(value: float) -> None:
    """A kernel that gets another number would end the process."""

    def function(p: Any) -> Any:
        return nn.functional.binary_cross_entropy(p, p) + (p @ p).sin(), torch.bernoulli(p) * 2

    fast, p = Parallel(function, pure=True), torch.full((8, 8), value, device=GPU)
    for _ in range(3):
        torch.manual_seed(0)
        expected = function(p)
        torch.manual_seed(0)
        assert_same(fast(p), expected)
    assert "could not be planned" not in fast.explain()
    torch.cuda.synchronize()


def classifier() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 64, 5),
    ).to(GPU)  # fmt: skip


def step_of(make: Callable[..., Any] | None) -> tuple[Any, Callable[..., Any]]:
    net = classifier()
    optimizer = make(net.parameters()) if make else None

    def step(x: Any, y: Any) -> Any:
        if optimizer is not None:
            optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(net(x), y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return net, step


MAKES: dict[str, Any] = {
    "no optimizer": None,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam, capturable": lambda parameters: torch.optim.Adam(parameters, lr=0.01, capturable=True),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True, capturable=True),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("lanes", "kind"), [(1, "graph"), (4, "graph"), (4, "stream")])
def test_training_steps(name: str, lanes: int, kind: str) -> None:
    """Batch normalisation, dropout with the same seed, gradients, updates: after every step the same bits."""
    torch.backends.cudnn.deterministic = True
    (plain, step), (net, ours) = step_of(MAKES[name]), step_of(MAKES[name])
    fast = Forced(ours, lanes, kind)
    for number in range(5):
        x, y = torch.randn(16, 1, 12, 12, device=GPU), torch.randint(5, (16,), device=GPU)
        torch.manual_seed(number)
        expected = step(x, y)
        torch.manual_seed(number)
        result = ours(x, y) if not number else fast(x, y)  # the first step makes the optimizer's state
        assert_same(result, expected)
        assert_same(list(net.state_dict().values()), list(plain.state_dict().values()))
        assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert int(net[1].num_batches_tracked) == 5


@each_run
def test_in_place_and_views(lanes: int, kind: str) -> None:
    total = torch.zeros(64, 64, device=GPU)

    def function(x: Any) -> Any:
        y = x @ x
        y[0].fill_(7.0)
        z = y.t()
        z.mul_(2)
        x.add_(1)
        total.add_(y)
        return y + x, z @ x

    fast = Forced(function, lanes, kind)
    for number in range(4):
        x = torch.full((64, 64), float(number), device=GPU)
        mine = x.clone()
        before = total.clone()
        result = fast(mine)
        after = total.clone()
        total.copy_(before)
        assert_same(result, function(x))
        assert_same(mine, x)
        assert_same(after, total)


@each_run
def test_copies_to_and_from_the_host(lanes: int, kind: str) -> None:
    w = torch.randn(256, 256, device=GPU) / 16

    def function(batches: list[Any]) -> list[Any]:
        return [(batch.to(GPU) @ w).relu().t().cpu() for batch in batches]

    fast = Forced(function, lanes, kind)
    kept = []
    for pin in (True, False, True):
        batches = [torch.randn(256, 256, pin_memory=pin) for _ in range(6)]
        expected = function(batches)
        kept.append((fast(batches), expected))
        for batch in batches:
            batch.zero_()  # the call is over: nobody reads it any more
    for ours, theirs in kept:
        assert_same(ours, theirs)


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_cpu_computes_in_between(lanes: int) -> None:
    def function(x: Any) -> Any:
        parts = [((x * k) @ x).cpu() for k in range(1, 5)]
        norms = [part.double().norm() for part in parts]
        return (torch.stack(norms).sum().float().to(GPU) * x), norms

    fast = Forced(function, lanes, "stream")
    for _ in range(4):
        x = torch.randn(300, 300, device=GPU)
        assert_same(fast(x), function(x))


def test_a_number_on_the_host_is_not_baked_in() -> None:
    fast = Parallel(lambda x, rate: (x @ x) * rate, pure=True)
    x = torch.randn(64, 64, device=GPU)
    for rate in (1.0, 2.0, 3.0):
        assert_same(fast(x, torch.tensor(rate)), (x @ x) * rate)
    assert "number from the host" in fast.explain()


def test_results_stay_unless_they_are_reused() -> None:
    w = torch.randn(128, 128, device=GPU) / 11
    xs = [[torch.randn(128, 128, device=GPU) for _ in range(8)] for _ in range(2)]
    keeping, reusing = (Parallel(chains, reuse_outputs=reuse, pure=True) for reuse in (False, True))
    first = keeping(xs[0], w)
    expected = [value.clone() for value in first]
    keeping(xs[1], w)
    assert_same(first, expected)
    assert_same(reusing(xs[0], w), expected)
    assert_same(reusing(xs[1], w), chains(xs[1], w))
    assert "graph" in keeping.explain()
    assert "equal to the bit" in keeping.explain()


def test_results_that_share_memory_share_it_again() -> None:
    def function(x: Any) -> Any:
        y = x @ x
        return y, y[1:3], y.t(), x @ y

    fast = Parallel(function, pure=True)
    x = torch.randn(64, 64, device=GPU)
    for _ in range(2):
        whole, rows, turned, other = fast(x)
        assert_same([whole, rows, turned, other], list(function(x)))
        whole.zero_()
        assert not rows.any()
        assert not turned.any()
        assert other.any()
    assert "one graph" in fast.explain()


def test_a_lane_that_runs_ahead_of_copies_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any) -> Any:
        return [(x * number).to("cpu") for number in range(60)]

    x = torch.randn(1024, 1024, device=GPU)
    size = x.numel() * x.element_size()
    monkeypatch.setattr(planning, "device_memory", lambda _: 100 * 20 * size)  # a hundredth is twenty results
    fast = Parallel(function, memory=1, pure=True)
    assert_same(fast(x), function(x))
    assert "run as plain execution" not in fast.explain(), fast.explain().splitlines()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fast(x)
    assert torch.cuda.max_memory_allocated() - before <= 22 * size, fast.explain()


def test_calls_on_two_streams_and_from_two_threads_do_not_mix() -> None:
    def function(x: Any) -> Any:
        for _ in range(30):
            y = x @ x
            x = y / y.norm()
        return x

    fast = Parallel(function, pure=True)
    xs = [torch.randn(1500, 1500, device=GPU) for _ in range(4)]
    expected = [function(x) for x in xs]
    fast(xs[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for number, x in enumerate(xs):
        with torch.cuda.stream(streams[number % 2]):
            results.append(fast(x))
    torch.cuda.synchronize()
    assert_same(results, expected)

    def work(number: int) -> None:
        for _ in range(20):
            assert torch.equal(fast(xs[number]), expected[number])

    at_once(work, 4)


def test_inside_a_graph_of_the_callers_own_it_is_run_as_it_is_written() -> None:
    def function(x: Any) -> Any:
        return (x @ x) + (x * 2) @ x

    fast = Parallel(function, pure=True)
    x = torch.randn(64, 64, device=GPU)
    expected = fast(x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = fast(x)
    captured.replay()
    torch.cuda.synchronize()
    assert_same([result], [expected])
    assert "capture of a CUDA graph" in fast.explain()


def _returns_its_loss(net: Any) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("reuse", [False, True])
def test_a_step_that_returns_its_loss(reuse: bool) -> None:
    """Its graph is used up: a plan of the whole step returns the loss's value."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    plain = torch.nn.Sequential(*layers).to("cuda")
    nets = [plain, copy.deepcopy(plain)]
    steps = [_returns_its_loss(net) for net in nets]
    fast = Parallel(steps[1], reuse_outputs=reuse, pure=True)
    x, y = torch.randn(32, 64, device="cuda"), torch.arange(32, device="cuda") % 10
    for _ in range(40):
        expected, result = steps[0](x, y), fast(x, y)
        assert torch.equal(result.detach(), expected.detach())
    for value, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(value, other)
    if fast.planned.method.is_plain:
        pytest.skip("plain execution won: other programs use the GPU or the host")
    assert "one graph" in fast.explain().splitlines()[0]
