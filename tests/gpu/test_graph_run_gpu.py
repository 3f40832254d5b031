"""A captured run that reads its arguments where they are: whose memory that is, and what becomes of it meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, assert_same, chains, graph_run_of  # noqa: E402

from manyhands.backends.torch.run import cuda_graph  # noqa: E402
from manyhands.backends.torch.run.streams import capturing  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402

MANY = cuda_graph._LIKELY + 8


def test_a_result_is_the_next_argument() -> None:
    """Results of either graph of a run: what is read in place is overwritten by nobody meanwhile."""

    def function(x: Any) -> Any:
        for _ in range(4):
            x = torch.stack([(x @ x).sin(), (x.t() @ x).cos(), x.tanh()]).mean(0)
        return x

    fast = Parallel(function, reuse_outputs=True, pure=True)
    ours = theirs = torch.randn(96, 96, device=GPU)
    for _ in range(2 * MANY):
        ours, theirs = fast(ours), function(theirs)
        assert_same(ours, theirs)
    assert graph_run_of(fast)._in_place is not None


def test_a_result_that_is_written_to_as_the_next_argument() -> None:
    def function(x: Any) -> Any:
        x.mul_(0.5)
        return (x @ x).sin() + x

    fast = Parallel(function, reuse_outputs=True, pure=True)
    start = torch.randn(96, 96, device=GPU)
    ours, theirs = start.clone(), start.clone()
    for _ in range(2 * MANY):
        ours, theirs = fast(ours), function(theirs)
        assert_same(ours, theirs)


def test_arguments_that_die_are_not_kept() -> None:
    """Each call has fresh arguments, which may or may not come to the same places."""

    def function(x: Any, y: Any) -> Any:
        return (x @ y).sin(), (y @ x).cos()

    fast = Parallel(function, pure=True)
    for number in range(2 * MANY):
        x, y = (torch.full((256, 256), value, device=GPU) for value in (number / 100, 1 / (number + 1)))
        assert_same(fast(x, y), function(x, y))
        del x, y
        torch.cuda.synchronize()
        if number == 1:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= before + 2 * 256 * 256 * 4  # the results of the second graph


def test_nothing_is_captured_again_where_nothing_is_copied() -> None:
    w = torch.randn(64, 64, device=GPU)
    fast = Parallel(lambda: [w @ w, (w * 2) @ w], pure=True)
    for _ in range(2 * MANY):
        assert_same(fast(), [w @ w, (w * 2) @ w])
    assert graph_run_of(fast)._in_place is None


def test_what_is_written_to_has_another_version() -> None:
    """A backward pass that has saved it must not take the new numbers for the old ones."""
    total = torch.zeros(64, 64, device=GPU)

    def function(x: Any) -> Any:
        x.mul_(0.5)
        total.add_(x @ x)
        return x @ total

    fast = Parallel(function, pure=True)
    x = torch.randn(64, 64, device=GPU)
    for _ in range(2 * MANY):
        weight = torch.ones(64, 64, device=GPU, requires_grad=True)
        for saved in (x, total):
            loss = (weight * saved).sum()
            fast(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("draws", [False, True])
def test_a_capture_that_fails_later_breaks_nothing(monkeypatch: pytest.MonkeyPatch, draws: bool) -> None:
    """Not this run, nor another function's graph, nor the random numbers of anybody."""

    def function(x: Any) -> Any:
        y = torch.rand_like(x) if draws else x.sin()
        return x @ y, (x * 2) @ x

    def other(x: Any) -> Any:
        return torch.rand_like(x) @ x, x @ x

    fast, beside = (Parallel(one, pure=True) for one in (function, other))
    x = torch.randn(64, 64, device=GPU)
    fast(x)
    beside(x)
    run = graph_run_of(fast)
    issue, failed = run._issue, []

    def fails(inputs: Any) -> Any:
        issue(inputs)
        failed.append(1)
        torch.cuda.current_stream().synchronize()  # no capture can have that

    monkeypatch.setattr(run, "_issue", fails)
    for number in range(2 * MANY):
        for ours, plain in ((fast, function), (beside, other)):
            torch.manual_seed(number)
            found = [*ours(x), torch.rand(3, device=GPU)]
            torch.manual_seed(number)
            assert_same(found, [*plain(x), torch.rand(3, device=GPU)])
    assert failed
    assert run._in_place is None


def test_a_conjugated_argument_in_the_same_place() -> None:
    fast = Parallel(lambda z: (z @ z, z * 2), pure=True)
    z = torch.randn(64, 64, device=GPU, dtype=torch.complex64)
    for one in [z] * MANY + [z.conj()] * MANY + [z, z.conj()]:
        assert_same(fast(one), (one @ one, one * 2))


def test_arguments_that_stay_where_they_are_are_read_there() -> None:
    """After many calls with the same tensors nothing is copied any more; what is in them, and other tensors, count."""

    def function(xs: list[Any], w: Any) -> list[Any]:
        w.add_(0.125)
        return [*chains(xs, w), torch.rand(8, device=GPU)]

    xs, w = [torch.randn(64, 64, device=GPU) / 8 for _ in range(4)], torch.randn(64, 64, device=GPU) / 8
    plain_xs, plain_w = [x.clone() for x in xs], w.clone()
    fast = Parallel(function, pure=True)
    torch.manual_seed(0)
    fast(xs, w)
    first, elsewhere = xs, [x.clone() for x in xs]
    for number in range(80):
        xs = elsewhere if 40 <= number < 60 else first
        plain_xs = [x.clone() for x in xs]
        xs[0].mul_(1.001)
        plain_xs[0].mul_(1.001)
        torch.manual_seed(number)
        ours = fast(xs, w)
        torch.manual_seed(number)
        if number == 0:
            function(plain_xs, plain_w)  # the call that was planned
            torch.manual_seed(number)
        assert_same(ours, function(plain_xs, plain_w))
        assert torch.equal(w, plain_w)
    assert "one graph" in fast.explain()


def test_calls_that_try_plans_do_not_count() -> None:
    """They are many, all with the same arguments: whether the caller's stay in their places is not known from them."""

    def function(x: Any, y: Any) -> Any:
        return [(x @ y).sin(), (y @ x).cos(), (x @ x).tanh()]

    fast = Parallel(function, compile=True, pure=True)
    x, y = (torch.randn(128, 128, device=GPU) for _ in range(2))
    assert_same([one.shape for one in fast(x, y)], [x.shape] * 3)
    assert graph_run_of(fast)._times < 2
    assert graph_run_of(fast)._in_place is None


def test_a_capture_that_fails_leaves_nothing_capturing() -> None:
    """It fails on another stream than the one that it began on, as a lane of a plan may."""
    before, side = torch.cuda.current_stream(), torch.cuda.Stream(GPU)

    def capture() -> None:
        with capturing(torch.cuda.CUDAGraph(keep_graph=True), GPU):
            side.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(side)
            torch.ones(3, device=GPU).sum().item()

    with pytest.raises(RuntimeError):
        capture()
    assert torch.cuda.current_stream() == before
    for stream in (before, side):
        with torch.cuda.stream(stream):
            assert not torch.cuda.is_current_stream_capturing()
            assert torch.rand(3, device=GPU).sum().item() > 0
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, GPU):
        result = torch.rand(3, device=GPU) + 1
    graph.replay()
    assert float(result.min()) >= 1
