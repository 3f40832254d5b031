"""CUDA streams that graphs are captured on, whose cuBLAS workspaces nobody else frees.

cuBLAS and cuBLASLt compute in workspaces, 32 MB on a Hopper GPU. PyTorch keeps one for each stream and thread, and a
captured graph goes on writing to the workspaces of its streams. But ``torch.compile(mode="reduce-overhead")`` frees all
workspaces when it records a graph of its own. A graph that was captured before would then write to memory that belongs
to somebody else by now, or to nobody.

So graphs are captured on streams of our own, which PyTorch gives to nobody. Their workspaces are allocated during the
capture of a small graph, which is never replayed (:func:`reserve_workspaces`). When they are freed, they stay in that
graph's memory pool, which nobody else allocates from.
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


class _Reserve:
    """The memory pool of reserved workspaces of each device, and the graph that keeps each pool."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[torch.device, Any] = {}
        self.keepers: dict[Any, torch.cuda.CUDAGraph] = {}


# Two: who reserves with gradients waits for the thread that computes them, and that thread may reserve for itself.
_reserves = {False: _Reserve(), True: _Reserve()}


def own_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """So many streams of the device, all different where there are enough; they come in turns."""
    if device.type != "cuda" or torch.version.cuda is None:
        return [new_stream(device) for _ in range(count)]
    device = _numbered(device)
    with _lock:
        streams = _streams.setdefault(device, [])
        first = _taken.get(device, 0)
        _taken[device] = first + count
        while len(streams) < min(first + count, _MOST):
            streams.append(new_stream(device))
        return [streams[number % _MOST] for number in range(first, first + count)]


def reserve_workspaces(streams: Sequence[torch.cuda.Stream], device: torch.device, *, gradients: bool = True) -> None:
    """Allocate this thread's workspaces for some streams in the pool that stays.

    Call it before anything runs on the streams, and again before each capture, as the workspaces may have been freed.
    ``gradients``: also those of the thread that runs backward passes.
    """
    if device.type != "cuda" or torch.version.cuda is None or not streams:
        return
    device, reserve = _numbered(device), _reserves[gradients]
    with (
        reserve.lock,
        torch.cuda.device(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        suppress(RuntimeError),  # no memory, or no products (deterministic algorithms): nothing is reserved
    ):
        # cuBLAS starts here, which cannot be captured; on the default stream, which is none of these.
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            x = torch.ones(16, 16, device=device, requires_grad=gradients)
            _multiply(x)
        torch.cuda.synchronize(device)  # a capture resets the random numbers' counters, which a replay may be reading
        pool = reserve.pools.pop(device, None) or torch.cuda.graph_pool_handle()
        reserve.keepers[pool] = _captured(x, streams, pool, device)
        reserve.pools[device] = pool  # not after an error: PyTorch may still take it for a pool of a capture


def _captured(
    x: torch.Tensor, streams: Sequence[torch.cuda.Stream], pool: Any, device: torch.device
) -> torch.cuda.CUDAGraph:
    """A graph with products on each stream."""
    graph = torch.cuda.CUDAGraph()
    first, *others = streams
    try:
        with torch.cuda.stream(first):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                _multiply(x)
                for stream in others:
                    stream.wait_stream(first)
                    try:
                        with torch.cuda.stream(stream):
                            _multiply(x)
                    finally:
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


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else has; one of PyTorch's pool where CUDA's driver cannot be asked."""
    if device.type != "cuda" or torch.version.cuda is None:
        return torch.cuda.Stream(device)
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
