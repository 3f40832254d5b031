"""Memsets of a captured graph become kernels, and write the same bytes at the same time."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch.kernels.nvrtc import compiled  # noqa: E402
from manyhands.backends.torch.run.graphs import nodes as graph_nodes  # noqa: E402
from manyhands.backends.torch.run.graphs.workspaces import workspace, workspaces_of  # noqa: E402
from manyhands.backends.torch.run.streams import capturing  # noqa: E402

GPU = torch.device("cuda", 0)
SIZE = 1000  # bytes of a workspace
_BYTES = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}


@pytest.fixture(autouse=True)
def _ready(gpu: None) -> None:
    """Kernels cannot be compiled during a capture, and graphs get an arena when somebody had a workspace."""
    compiled("fill.cu", GPU)
    workspace(SIZE, GPU)


def memset(tensor: Any, value: int, element_bytes: int) -> None:
    """Fill a tensor of bytes as CUDA's driver does it, on the current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    count = ctypes.c_size_t(tensor.numel() // element_bytes)
    fill = getattr(compiled("fill.cu", GPU).driver, _BYTES[element_bytes])
    assert fill(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint(value), count, stream) == 0


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("size", [4, 64, 100, 1 << 20, 50_000_004])
@pytest.mark.parametrize("offset", [0, 4])
def test_the_same_bytes(element_bytes: int, size: int, offset: int) -> None:
    value = {1: 0xA7, 2: 0xA7B1, 4: 0xA7B1C309}[element_bytes]
    expected = torch.zeros(size + 8, dtype=torch.uint8, device=GPU)
    memset(expected[offset : offset + size], value, element_bytes)
    found = torch.zeros_like(expected)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        memset(found[offset : offset + size], value, element_bytes)
    is_left_alone = offset and size > 1 << 16  # the kernel is quick where memory begins at a multiple of 16 bytes
    assert graph_nodes.instantiate(graph, GPU) == (0 if is_left_alone else 1)
    graph.replay()
    assert torch.equal(found, expected)


def test_between_what_comes_before_and_behind() -> None:
    """On two streams, with memsets before, between and behind kernels of both."""
    memory = torch.zeros(4096, dtype=torch.uint8, device=GPU)
    seen = torch.zeros(3, 2, 4096, dtype=torch.uint8, device=GPU)
    side = torch.cuda.Stream(GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        main = torch.cuda.current_stream()
        for turn in range(3):
            memset(memory, 10 * (turn + 1), 1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                seen[turn, 0].copy_(memory + 1)
            seen[turn, 1].copy_(memory + 2)
            main.wait_stream(side)
        memset(memory, 77, 1)
    assert graph_nodes.instantiate(graph, GPU) == 4
    for _ in range(20):
        seen.zero_()
        graph.replay()
        for turn in range(3):
            assert (seen[turn, 0] == 10 * (turn + 1) + 1).all()
            assert (seen[turn, 1] == 10 * (turn + 1) + 2).all()
        assert (memory == 77).all()


def test_a_graph_that_cannot_be_changed_stays_as_it_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_nodes, "_NEEDED", ("cuGraphThatDoesNotExist",))
    memory = torch.zeros(64, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        memset(memory, 5, 1)
    assert graph_nodes.instantiate(graph, GPU) == 0
    graph.replay()
    assert (memory == 5).all()


def test_convolutions_leave_no_memsets() -> None:
    """The reason for all this: cuDNN clears its workspace."""
    x = torch.randn(64, 64, 28, 28, device=GPU, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device=GPU, dtype=torch.bfloat16)
    layer = layer.to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with capturing(graph, GPU):
            found = layer(x)
    graph_nodes.instantiate(graph, GPU)
    driver = compiled("fill.cu", GPU).driver
    assert not list(graph_nodes.nodes_of(driver, graph.raw_cuda_graph(), graph_nodes.MEMSET))
    graph.replay()
    assert torch.equal(found, expected)


# Workspaces: their memsets come at the start of the graph


def shared(size: int, device: Any) -> Any:
    """Memory that others have before and after, as workspaces outside of a graph's arena do."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def call(space: Any, target: Any, number: int) -> None:
    """What a library does with a workspace: clears it, computes in it, and leaves it dirty."""
    memset(space, 0, 1)
    torch.add(space, number, out=target)
    space.fill_(0xEE)


def dirty() -> None:
    """Write to memory that whoever allocates next may get."""
    torch.full((SIZE,), 0xDD, dtype=torch.uint8, device=GPU)


def fills(graph: Any) -> int:
    """How many kernels of a graph fill memory."""
    kernels, settings, count = compiled("fill.cu", GPU), graph_nodes.KernelNode(), 0
    for node in graph_nodes.nodes_of(kernels.driver, graph.raw_cuda_graph(), graph_nodes.KERNEL):
        status = kernels.driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(settings))
        count += status == 0 and settings.function == kernels.function("fill").value
    return count


def memsets(graph: Any) -> int:
    driver = compiled("fill.cu", GPU).driver
    return len(list(graph_nodes.nodes_of(driver, graph.raw_cuda_graph(), graph_nodes.MEMSET)))


def check_replays(graph: Any, seen: Any, expected: list[int]) -> None:
    for _ in range(20):
        seen.zero_()
        graph.replay()
        assert seen.eq(torch.tensor(expected, dtype=torch.uint8, device=GPU)[:, None]).all()


@pytest.mark.parametrize("first_is_memset", [False, True])
def test_one_kernel_clears_the_workspaces_of_all_calls(first_is_memset: bool) -> None:
    seen = torch.zeros(6, SIZE, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        for number in range(6):
            if number or not first_is_memset:
                dirty()
            call(workspace(SIZE, GPU), seen[number], number + 1)
    assert len(workspaces_of(graph)) == 6
    assert graph_nodes.instantiate(graph, GPU) == 6
    assert (fills(graph), memsets(graph)) == (1, 0)
    check_replays(graph, seen, [1, 2, 3, 4, 5, 6])


def test_memory_that_others_have_too_is_cleared_at_its_place() -> None:
    seen = torch.zeros(6, SIZE, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        for number in range(6):
            dirty()
            call((shared if number % 2 else workspace)(SIZE, GPU), seen[number], number + 1)
    assert graph_nodes.instantiate(graph, GPU) == 6
    assert (fills(graph), memsets(graph)) == (1 + 3, 0)
    check_replays(graph, seen, [1, 2, 3, 4, 5, 6])


def test_a_call_that_clears_again_does_so_at_its_place() -> None:
    seen = torch.zeros(4, SIZE, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        dirty()
        for number in (0, 2):
            space = workspace(SIZE, GPU)
            call(space, seen[number], number + 1)
            call(space, seen[number + 1], number + 2)
    assert graph_nodes.instantiate(graph, GPU) == 4
    assert (fills(graph), memsets(graph)) == (1 + 2, 0)
    check_replays(graph, seen, [1, 2, 3, 4])


def test_a_call_that_does_not_begin_with_the_memset_clears_at_its_place() -> None:
    seen = torch.zeros(3, SIZE, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        for number in range(3):
            space = workspace(SIZE, GPU)
            space.fill_(0xCC)
            call(space, seen[number], number + 1)
    assert graph_nodes.instantiate(graph, GPU) == 3
    assert (fills(graph), memsets(graph)) == (3, 0)
    check_replays(graph, seen, [1, 2, 3])


def test_a_value_other_than_zero_is_written_at_its_place() -> None:
    seen = torch.zeros(3, SIZE, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        for number in range(3):
            space = workspace(SIZE, GPU)
            memset(space, 10 * number + 10, 1)
            torch.add(space, 1, out=seen[number])
            space.fill_(0xEE)
    assert graph_nodes.instantiate(graph, GPU) == 3
    check_replays(graph, seen, [11, 21, 31])


def test_calls_on_streams_that_fork_and_join() -> None:
    seen = torch.zeros(9, SIZE, dtype=torch.uint8, device=GPU)
    side = torch.cuda.Stream(GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        main = torch.cuda.current_stream()
        for turn in range(3):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                dirty()
                call(workspace(SIZE, GPU), seen[3 * turn], 1)
            call(workspace(SIZE, GPU), seen[3 * turn + 1], 2)
            main.wait_stream(side)
            call(workspace(SIZE, GPU), seen[3 * turn + 2], 3)  # waits for both
            seen[3 * turn].add_(seen[3 * turn + 2])
    assert graph_nodes.instantiate(graph, GPU) == 9
    assert (fills(graph), memsets(graph)) == (1, 0)
    check_replays(graph, seen, [4, 2, 3] * 3)


def test_another_graph_of_the_same_pool_has_other_memory() -> None:
    """Its results stay while the first graph clears its workspaces."""
    seen = torch.zeros(2, 2, SIZE, dtype=torch.uint8, device=GPU)
    graphs, pool = [], None
    for turn in range(2):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with capturing(graph, GPU, pool=pool):
            for number in range(2):
                call(workspace(SIZE, GPU), seen[turn, number], turn + 1)
            result = seen[turn] + 0
        graph_nodes.instantiate(graph, GPU)
        pool = graph.pool()
        graphs.append(graph)
    spaces = [(space.begin, space.end) for graph in graphs for space in workspaces_of(graph)]
    assert all(first[1] <= second[0] for first, second in zip(sorted(spaces), sorted(spaces)[1:], strict=False))
    for _ in range(5):
        graphs[1].replay()
        graphs[0].replay()
        assert (result == 2).all()
        assert (seen[0] == 1).all()


def test_deterministic_algorithms_fill_no_room() -> None:
    """PyTorch fills new memory then, at the start of a capture too."""
    seen = torch.zeros(3, SIZE, dtype=torch.uint8, device=GPU)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.use_deterministic_algorithms(True)
    try:
        with capturing(graph, GPU):
            for number in range(3):
                call(workspace(SIZE, GPU), seen[number], number + 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not workspaces_of(graph)
    assert graph_nodes.instantiate(graph, GPU) == 3
    check_replays(graph, seen, [1, 2, 3])


def test_a_backward_pass_in_its_thread_has_parts_of_the_room() -> None:
    class Called(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, target: Any) -> Any:
            ctx.target = target
            call(workspace(SIZE, GPU), target[0], 1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            call(workspace(SIZE, GPU), ctx.target[1], 2)
            return gradient * 2, None

    seen = torch.zeros(2, SIZE, dtype=torch.uint8, device=GPU)
    x = torch.ones(4, device=GPU, requires_grad=True)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, GPU):
        (gradient,) = torch.autograd.grad(Called.apply(x, seen).sum(), x)
    assert len(workspaces_of(graph)) == 2
    assert graph_nodes.instantiate(graph, GPU) == 2
    assert (fills(graph), memsets(graph)) == (1, 0)
    check_replays(graph, seen, [1, 2])
    assert (gradient == 2).all()
