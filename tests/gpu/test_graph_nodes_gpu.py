"""Memsets of a captured graph become kernels, and write the same bytes at the same time."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch.kernels.nvrtc import compile_file  # noqa: E402
from manyhands.backends.torch.run import graph_nodes  # noqa: E402
from manyhands.backends.torch.run.streams import capture_graph  # noqa: E402

GPU = torch.device("cuda", 0)
_BYTES = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}


@pytest.fixture(autouse=True)
def _ready(gpu: None) -> None:
    """Kernels cannot be compiled during a capture."""
    compile_file("fill.cu", GPU)


def memset(tensor: Any, value: int, element_bytes: int) -> None:
    """Fill a tensor of bytes as CUDA's driver does it, on the current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    count = ctypes.c_size_t(tensor.numel() // element_bytes)
    fill = getattr(compile_file("fill.cu", GPU).driver, _BYTES[element_bytes])
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
    with capture_graph(graph, GPU):
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
    with capture_graph(graph, GPU):
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
    with capture_graph(graph, GPU):
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
        with capture_graph(graph, GPU):
            found = layer(x)
    graph_nodes.instantiate(graph, GPU)
    driver = compile_file("fill.cu", GPU).driver
    assert not list(graph_nodes.nodes_of(driver, graph.raw_cuda_graph(), graph_nodes.MEMSET))
    graph.replay()
    assert torch.equal(found, expected)
