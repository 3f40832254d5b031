"""Captured graphs keep their cuBLAS workspaces, also when torch.compile frees all that PyTorch knows of."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, Forced  # noqa: E402

from manyhands import torch as mh  # noqa: E402
from manyhands.backends.torch.run import own_streams  # noqa: E402

DEVICE = torch.device("cuda", 0)


def products(x: Any, w: Any) -> list[Any]:
    """Long rows, few columns: cuBLAS splits the sums, and adds them up in its workspace; with a bias it is cuBLASLt."""
    found = [(x * number) @ w for number in range(1, 5)]
    return found + [torch.addmm(w[number], x[:, :13], w[:13]) for number in range(2)] + [torch.addmm(w[0], x, w)]


def arguments() -> tuple[Any, Any]:
    return tuple(torch.randn(shape, device=GPU, dtype=torch.bfloat16) for shape in ((64, 16384), (16384, 64)))  # type: ignore[return-value]


def take_workspaces_away() -> list[Any]:
    """What recording a graph of torch.compile does; then somebody else has the memory."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return [torch.full((1 << 20,), 7.0, device=GPU) for _ in range(64)]


@pytest.mark.parametrize("lanes", [1, 4])
def test_workspaces_that_are_taken_away(lanes: int) -> None:
    x, w = arguments()
    expected = products(x, w)
    fast = Forced(products, lanes, "graph")
    fast(x, w)
    for _ in range(3):
        others = take_workspaces_away()
        for _ in range(50):  # the arguments' places become known: a second graph is captured
            found = fast(x, w)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
        assert all(bool((other == 7).all()) for other in others)


def test_beside_a_graph_of_torch_compile() -> None:
    x, w = arguments()
    expected = products(x, w)
    fast = mh.parallel(products)
    fast(x, w)
    torch._dynamo.reset()
    compiled = torch.compile(products, mode="reduce-overhead")
    for _ in range(5):
        theirs = [result.clone() for result in compiled(x, w)]
        found = fast(x, w)
        torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
    for one, other in zip(theirs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=2.0)


def test_streams_that_are_current_are_reserved_too() -> None:
    """As a training step reserves its own: its workspace stays where it is when all are freed."""
    (stream,) = own_streams.own_streams(DEVICE, 1)
    x, w = arguments()
    with torch.cuda.stream(stream):
        own_streams.reserve_workspaces([stream], DEVICE)
        expected = products(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = products(x, w)
    others = take_workspaces_away()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize("gradients", [False, True])
def test_reserving_does_not_wait_for_the_gpu(gradients: bool) -> None:
    """A training job reserves in the middle of its epochs, while hundreds of steps are under way."""
    (stream,) = own_streams.own_streams(DEVICE, 1)
    own_streams.reserve_workspaces([stream], DEVICE, gradients=gradients)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    begin.record()
    own_streams.reserve_workspaces([stream], DEVICE, gradients=gradients)
    end.record()
    assert not begin.query()
    end.synchronize()


def test_reserving_leaves_no_workspaces_elsewhere() -> None:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    (stream,) = own_streams.own_streams(DEVICE, 1)
    own_streams.reserve_workspaces([stream], DEVICE, gradients=False)
    reserved = torch.cuda.memory_allocated()
    with torch.cuda.stream(stream):
        found = products(*arguments())
    torch.cuda.synchronize()
    del found
    torch._C._cuda_clearCublasWorkspaces()
    one_stream = reserved - torch.cuda.memory_allocated()
    with torch.cuda.stream(stream):
        x, w = arguments()
        before = torch.cuda.memory_allocated()
        x @ w, torch.addmm(w[0], x, w)
        assert torch.cuda.memory_allocated() - before == one_stream


def test_streams_are_different_and_come_in_turns() -> None:
    streams = own_streams.own_streams(DEVICE, 32)
    assert len({stream.cuda_stream for stream in streams}) == 32
    pooled = {torch.cuda.Stream(DEVICE).cuda_stream for _ in range(64)}
    assert not pooled & {stream.cuda_stream for stream in streams}
    assert own_streams.own_streams(DEVICE, 1)[0].cuda_stream == streams[0].cuda_stream


def test_a_captured_training_step_survives_too() -> None:
    images = torch.randn(512, 16384)  # long rows: their sums are split, and added up in a workspace
    labels = torch.randint(10, (512,))

    def losses(disturb: bool) -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16384, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        others: list[Any] = []

        class Disturbs(mh.Callback):
            def on_epoch_end(self, *_: Any) -> None:
                if disturb:
                    others[:] = take_workspaces_away()

        trainer = mh.Trainer(4, devices=["gpu:0"], batch_size=64, lr=0.05, seed=1, quiet=True, callbacks=[Disturbs()])
        result = trainer.fit(net, (images, labels))
        assert all(bool((other == 7).all()) for other in others)
        return [row["train_loss"] for row in result.rows]

    assert losses(True) == losses(False)
