"""CUDA streams that graphs are captured on: nobody else uses them, and nobody frees their cuBLAS workspaces.

cuBLAS and cuBLASLt compute in workspaces, 32 MB on a Hopper GPU. PyTorch keeps one for each stream and thread, and a
captured graph goes on writing to the workspaces of its streams. But ``torch.compile(mode="reduce-overhead")`` frees all
workspaces when it records a graph of its own. A graph that was captured before would then write to memory that belongs
to somebody else by now, or to nobody.

So graphs are captured on streams of our own, and their workspaces are allocated during the capture of a small graph,
which is never replayed (:func:`reserve_workspaces`). Whatever is freed there stays with that graph's memory pool.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from manyhands.backends.torch.kernels.nvrtc import cuda_driver
from manyhands.backends.torch.run.streams import reset_generator
from manyhands.errors import CannotCompile

_MOST = 32  # streams of a device, as many as PyTorch has in its pool: each may have a workspace
_NON_BLOCKING = 1  # such a stream does not wait for the default stream
_lock = threading.Lock()
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_taken: dict[torch.device, int] = {}
_pools: dict[torch.device, Any] = {}
_keepers: dict[torch.device, torch.cuda.CUDAGraph] = {}  # the graph that keeps the pool of workspaces


def own_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """So many streams of the device, all different where there are enough; they come in turns."""
    if device.type != "cuda" or torch.version.cuda is None:
        return [torch.cuda.Stream(device) for _ in range(count)]
    device = _numbered(device)
    with _lock:
        streams = _streams.setdefault(device, [])
        first = _taken.get(device, 0)
        _taken[device] = first + count
        while len(streams) < min(first + count, _MOST):
            streams.append(_created(device))
        return [streams[number % _MOST] for number in range(first, first + count)]


def reserve_workspaces(streams: Sequence[torch.cuda.Stream], device: torch.device, *, gradients: bool = True) -> None:
    """Allocate the workspaces of this thread for streams, where they stay, before anything else runs on the streams.

    And again before a capture, as somebody may have freed them. ``gradients``: also those of the thread that runs
    backward passes.
    """
    if device.type != "cuda" or torch.version.cuda is None or not streams:
        return
    device = _numbered(device)
    with (
        _lock,
        torch.cuda.device(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        suppress(RuntimeError),  # no memory, or products are refused (deterministic algorithms): then it is without
    ):
        x = torch.ones(16, 16, device=device, requires_grad=gradients)
        _multiply(x)  # cuBLAS begins, which cannot be captured
        if device not in _pools:
            _pools[device] = torch.cuda.graph_pool_handle()
        _keepers[device] = _captured(x, streams, device)


def _captured(x: torch.Tensor, streams: Sequence[torch.cuda.Stream], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph with a product on each stream."""
    graph = torch.cuda.CUDAGraph()
    first, *others = streams
    first.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(first):
            graph.capture_begin(pool=_pools[device], capture_error_mode="thread_local")
            try:
                _multiply(x)
                for stream in others:
                    stream.wait_stream(first)
                    with torch.cuda.stream(stream):
                        _multiply(x)
                    first.wait_stream(stream)
            finally:
                graph.capture_end()
    except BaseException:
        reset_generator(device)
        raise
    return graph


def _multiply(x: torch.Tensor) -> None:
    """Products here, and where ``x`` requires gradients, more in the thread that computes them.

    Without a bias and with one: cuBLAS and cuBLASLt may have workspaces of their own.
    """
    product = torch.addmm(x[0], x, x @ x)
    if x.requires_grad:
        torch.autograd.grad(product.sum(), x)


def _created(device: torch.device) -> torch.cuda.Stream:
    """A new stream; one of PyTorch's pool where CUDA's driver cannot be asked."""
    try:
        driver = cuda_driver()
    except CannotCompile:
        return torch.cuda.Stream(device)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes sure of a context
        if driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING):
            return torch.cuda.Stream(device)
    return torch.cuda.ExternalStream(handle.value, device=device)


def _numbered(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
