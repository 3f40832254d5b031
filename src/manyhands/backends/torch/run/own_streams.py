"""CUDA streams for capturing graphs, whose cuBLAS workspaces are never reused by others.

cuBLAS and cuBLASLt compute in workspaces, 32 MB on a Hopper GPU. PyTorch keeps one for each stream and thread, and a
captured graph keeps writing to the workspaces of its streams. But ``torch.compile(mode="reduce-overhead")`` frees all
workspaces when it records a graph. A graph that was captured earlier would then write to memory that is free or belongs
to other tensors.

So graphs are captured on private streams, which PyTorch hands out to nobody else, and their workspaces are allocated
from a private memory pool (:func:`reserve_workspaces`). When they are freed, they stay in that pool.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.kernels.nvrtc import cuda_driver
from manyhands.errors import CannotCompile

_MOST = 32  # streams per device, as many as in PyTorch's pool: each may have a workspace
_NON_BLOCKING = 1  # such a stream does not wait for the default stream
_lock = threading.Lock()
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_taken: dict[torch.device, int] = {}
# The pool of each device, and a second pool with gradients: a thread that reserves those waits for the backward
# thread, which may at the same time reserve workspaces itself.
_pools: dict[tuple[torch.device, bool], tuple[int, int]] = {}
_turns = {False: threading.Lock(), True: threading.Lock()}


def own_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """``count`` streams of the device, all different if there are enough; they are used in rotation."""
    if device.type != "cuda" or torch.version.cuda is None:
        return [new_stream(device) for _ in range(count)]
    device = _with_number(device)
    with _lock:
        streams = _streams.setdefault(device, [])
        first = _taken.get(device, 0)
        _taken[device] = first + count
        while len(streams) < min(first + count, _MOST):
            streams.append(new_stream(device))
        return [streams[number % _MOST] for number in range(first, first + count)]


def reserve_workspaces(streams: Sequence[torch.cuda.Stream], device: torch.device, *, gradients: bool = True) -> None:
    """Allocate this thread's workspaces for these streams in the private pool.

    Call it before anything runs on the streams, and again before each capture, as the workspaces may have been freed.
    ``gradients``: also allocate those of the thread that runs backward passes. The host does not wait.
    """
    if device.type != "cuda" or torch.version.cuda is None or not streams:
        return
    device = _with_number(device)
    with (
        _turns[gradients],
        torch.cuda.device(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        suppress(RuntimeError),  # out of memory, or products are refused (deterministic algorithms)
    ):
        pool = _pools.setdefault((device, gradients), torch.cuda.graph_pool_handle())
        current = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(current)  # graphs captured on the stream may be running on the current one
            with torch.cuda.stream(stream), compat.allocating_from(pool, device):
                _multiply(torch.ones(16, 16, device=device, requires_grad=gradients))
            current.wait_stream(stream)


def _multiply(x: torch.Tensor) -> None:
    """Compute products in this thread and, if ``x`` requires gradients, in the backward thread.

    One has a bias and one has none: cuBLAS and cuBLASLt may have separate workspaces.
    """
    product = torch.addmm(x[0], x, x @ x)
    if x.requires_grad:
        torch.autograd.grad(product.sum(), x)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A private stream; a stream of PyTorch's pool if CUDA's driver cannot be called."""
    if device.type != "cuda" or torch.version.cuda is None:
        return torch.cuda.Stream(device)
    try:
        driver = cuda_driver()
    except CannotCompile:
        return torch.cuda.Stream(device)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # ensures that there is a context
        if driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING):
            return torch.cuda.Stream(device)
    return torch.cuda.ExternalStream(handle.value, device=device)


def _with_number(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
