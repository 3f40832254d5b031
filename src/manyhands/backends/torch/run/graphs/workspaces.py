"""Workspaces of library calls that nothing else in a captured CUDA graph touches.

A workspace is memory that a call computes in. Usually it is freed after the call, and the next allocation in the graph
gets the same memory: then the call has to clear it at its place in the graph. So a graph has an arena for small
workspaces. It is allocated before anything else is captured. Each call gets a part of it, and no part is used twice::

    arena   | call 1 | call 2 | call 3 |       not used       |

Nothing writes to a part between the start of the graph and its call, so all parts can be cleared at once, at the start
of the graph (:mod:`.nodes`). The arena lives as long as the graph; otherwise another graph with the same memory pool
could store its results there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from manyhands.backends.torch.kernels.nvrtc import cuda_driver
from manyhands.errors import CannotCompile

_ARENA = 1 << 20  # bytes per graph: PyTorch reserves 2 MiB for this size, and 20 MiB for one byte more
LARGEST = 1 << 16  # bytes of a workspace
_ALIGNED = 512  # bytes, as PyTorch aligns memory
_QUERY = "cuStreamGetCaptureInfo_v3"
_CAPTURING = 1  # the state of a stream that is being captured
_lock = threading.Lock()
_asked = threading.Event()  # set once a call has used a small workspace: before that, no graph needs an arena
_arenas: dict[int, _Arena] = {}  # of captures in progress, by CUDA's capture id
_arena_of: WeakKeyDictionary[torch.cuda.CUDAGraph, _Arena] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace: its first address, the address after its end, and the nodes that its call directly follows."""

    begin: int
    end: int
    before: frozenset[int]


class _Arena:
    """Memory of a graph that is handed out in parts."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._used = memory, 0
        self.workspaces: list[Workspace] = []

    def part(self, size: int, before: frozenset[int]) -> torch.Tensor | None:
        """The next part; None if the arena is full."""
        first, last = self._used, self._used + size
        if last > len(self._memory):
            return None
        self._used = -(-last // _ALIGNED) * _ALIGNED
        address = self._memory.data_ptr()
        self.workspaces.append(Workspace(address + first, address + last, before))
        return self._memory[first:last]


def workspace(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes for the next call on the current stream: launch nothing on the stream before that call."""
    if 0 < size <= LARGEST:
        _asked.set()
        # Ask PyTorch first: it ensures that there is a context, without which CUDA's driver may crash.
        if _arenas and torch.cuda.is_current_stream_capturing() and (state := _capture(device)) is not None:
            number, before = state
            with _lock:
                part = _arenas[number].part(size, before) if number in _arenas else None
            if part is not None:
                return part
    return torch.empty(max(1, size), dtype=torch.uint8, device=device)


@contextmanager
def arena_for_workspaces(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Give a graph an arena for workspaces; enter this right after its capture has begun.

    CUDA says which capture a call belongs to: backward passes run in another thread, and other threads may be capturing
    other graphs.
    """
    if not _asked.is_set() or not has_arenas():
        yield
        return
    arena = _Arena(torch.empty(_ARENA, dtype=torch.uint8, device=device))
    number, before = _capture(device) or (0, frozenset())
    # In deterministic mode PyTorch fills new memory, so ``before`` is not empty: it would overwrite the cleared arena.
    with _lock:
        if number and not before:
            _arenas[number] = arena
    try:
        yield
    finally:
        with _lock:
            _arenas.pop(number, None)
    if arena.workspaces:
        with _lock:
            _arena_of[graph] = arena


def workspaces_of(graph: torch.cuda.CUDAGraph) -> Sequence[Workspace]:
    """The parts of a captured graph's arena."""
    with _lock:
        arena = _arena_of.get(graph)
    return () if arena is None else arena.workspaces


def has_arenas() -> bool:
    """Whether captured graphs have arenas for workspaces: CUDA's driver has to support queries of captures."""
    try:
        return hasattr(cuda_driver(), _QUERY)
    except CannotCompile:
        return False


def _capture(device: torch.device) -> tuple[int, frozenset[int]] | None:
    """The id of the capture on the current stream, and the nodes that the next node on it will wait for.

    None if nothing is captured, or if an edge to the next node would not be a plain wait (CUDA returns an error then).
    """
    state, number, graph, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    places = [ctypes.byref(value) for value in (state, number, graph, nodes)]
    status = getattr(cuda_driver(), _QUERY)(stream, *places, None, ctypes.byref(count))
    if status or state.value != _CAPTURING:
        return None
    return number.value, frozenset(nodes[i] or 0 for i in range(count.value))
