"""Copies inside of a CUDA graph between its own memory and memory that is elsewhere at every replay.

A captured graph reads and writes the same addresses for ever, but arguments lie wherever the caller has them, and
results go to fresh memory, which is the caller's. To copy these before and after a replay takes two more launches, each
as long for the host as the graph's own. So the copies are nodes of the graph: kernels of ours (``copy_parts.cu``) that
take addresses as arguments, and these are set in the instantiated graph before it is launched:

    results = fresh()
    copies.aim(results)
    graph.replay()

A replay that is still under way keeps the addresses that it was launched with. Nobody may aim, or replay the same
graph, in another thread at the same time.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch

from manyhands.backends.torch_cuda_source import Kernels, compiled
from manyhands.errors import CannotCompile

_SIZES = (8, 32, 120)  # parts that a kernel has room for; its arguments are 32 bytes for each, and may be 4096
_THREADS = 256
_CHUNK = _THREADS * 16 * 8  # bytes that a block copies
_NEVER = (1 << 63) - 1  # the first block of parts that there are not
_KERNEL = 0  # the type of a node


def can_be_copied(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether copying these is copying bytes: on one GPU, each in a piece of memory without gaps."""
    return 0 < len(tensors) <= _SIZES[-1] and all(
        one.is_cuda
        and one.layout is torch.strided
        and one.device == tensors[0].device
        and not (one.is_conj() or one.is_neg())
        and torch.empty_like(one, device="meta").stride() == one.stride()  # otherwise it has gaps, or overlaps itself
        for one in tensors
    )


def prepare(count: int, device: torch.device) -> Kernels:
    """The kernels for so many tensors; compiled when this is first called, which is to be before a capture."""
    room = next(size for size in _SIZES if size >= count)
    kernels = compiled("copy_parts.cu", device, PARTS=str(room), CHUNK=str(_CHUNK))
    for name in ("copy_in", "copy_out"):
        kernels.function(name)
    return kernels


class Copies:
    """From tensors elsewhere to these (``copy_in``), or from these to tensors elsewhere (``copy_out``).

    The tensors are such as :func:`can_be_copied`; those elsewhere have the same form.
    """

    def __init__(self, name: str, near: Sequence[torch.Tensor], device: torch.device) -> None:
        self._kernels, self._name = prepare(len(near), device), name
        room = next(size for size in _SIZES if size >= len(near))
        sizes = [one.numel() * one.element_size() for one in near]
        blocks = [math.ceil(size / _CHUNK) for size in sizes]
        # As the kernel has them: all sources, all targets, all sizes, all first blocks.
        self._numbers = (ctypes.c_uint64 * (4 * room))()
        here, there = (room, 0) if name == "copy_in" else (0, room)
        self._numbers[here : here + len(near)] = [one.data_ptr() for one in near]
        self._numbers[2 * room : 2 * room + len(near)] = sizes  # type: ignore[assignment]
        firsts = [sum(blocks[:number]) for number in range(len(near))]
        self._numbers[3 * room :] = firsts + [_NEVER] * (room - len(near))  # type: ignore[assignment]
        self._first, self._last = there, there + len(near)
        self._blocks = max(1, sum(blocks))
        self._places = (ctypes.c_void_p * 1)(ctypes.addressof(self._numbers))
        self._settings = _Settings()

    def launch(self) -> None:
        """Put the copies on the current stream, which is being captured; they copy nothing before they are aimed."""
        self._kernels.launch_at(self._name, (self._blocks, 1), (_THREADS, 1), self._places)

    def find(self, graph: torch.cuda.CUDAGraph) -> None:
        """Look up the copies in the graph that was captured, which was told to keep what it is made of."""
        driver, function = self._kernels.driver, self._kernels.function(self._name)
        node = _node(driver, graph.raw_cuda_graph(), function, self._settings)
        self._settings.places = ctypes.addressof(self._places)
        self._settings.extra = None
        context = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(context))
        self._settings.context = context.value  # of the caller's threads, some may not have it yet
        self._graph = graph  # keeps the node
        given = graph.raw_cuda_graph_exec(), node, ctypes.addressof(self._settings)
        self._set = functools.partial(driver.cuGraphExecKernelNodeSetParams_v2, *map(ctypes.c_void_p, given))

    def aim(self, far: Sequence[torch.Tensor]) -> None:
        """The next replay copies from, or to, these."""
        self._numbers[self._first : self._last] = [one.data_ptr() for one in far]
        if answer := self._set():
            raise RuntimeError(f"CUDA does not let the copies of a graph be aimed anew: error {answer}")


class _Settings(ctypes.Structure):
    """CUDA's description of a kernel in a graph (``CUDA_KERNEL_NODE_PARAMS_v2``)."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("places", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def _node(driver: ctypes.CDLL, graph: int, function: ctypes.c_void_p, settings: _Settings) -> int:
    """The graph's node that runs this kernel; ``settings`` are filled with what it was captured with."""
    count = ctypes.c_size_t()
    whole = ctypes.c_void_p(graph)
    driver.cuGraphGetNodes(whole, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver.cuGraphGetNodes(whole, nodes, ctypes.byref(count))
    kind = ctypes.c_int()
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) or kind.value != _KERNEL:
            continue
        answer = driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(settings))
        if answer == 0 and settings.function == function.value:
            assert node is not None
            return node
    raise CannotCompile("the copies are not in the graph that was captured with them")
