"""A captured run: its arguments and results, and captures that fail."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, assert_same, chains  # noqa: E402

from manyhands.backends.torch.run.streams import capture_graph  # noqa: E402
from manyhands.parallel.function import Parallel  # noqa: E402

MANY = 20


def reads(x: Any) -> Any:
    for _ in range(4):
        x = torch.stack([(x @ x).sin(), (x.t() @ x).cos(), x.tanh()]).mean(0)
    return x


def writes(x: Any) -> Any:
    x.mul_(0.5)
    return (x @ x).sin() + x


@pytest.mark.parametrize("function", [reads, writes])
def test_a_result_is_the_next_argument(function: Any) -> None:
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
    assert torch.cuda.memory_allocated() <= before


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


def test_a_conjugated_argument_in_the_same_place() -> None:
    fast = Parallel(lambda z: (z @ z, z * 2), pure=True)
    z = torch.randn(64, 64, device=GPU, dtype=torch.complex64)
    for one in [z] * MANY + [z.conj()] * MANY + [z, z.conj()]:
        assert_same(fast(one), (one @ one, one * 2))


def test_what_is_in_the_arguments_counts() -> None:

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


def test_a_capture_that_fails_leaves_nothing_capturing() -> None:
    """It fails on another stream than the one that it began on, as a lane of a plan may."""
    before, side = torch.cuda.current_stream(), torch.cuda.Stream(GPU)

    def capture() -> None:
        with capture_graph(torch.cuda.CUDAGraph(keep_graph=True), GPU):
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
    with capture_graph(graph, GPU):
        result = torch.rand(3, device=GPU) + 1
    graph.replay()
    assert float(result.min()) >= 1
