"""Finds the nodes of a captured CUDA graph before it is instantiated, and replaces memsets by kernels.

cuDNN clears a few bytes of its workspace before many convolutions. In a CUDA graph that is a memset node, and on an
H200 it keeps the kernels around it 8 to 11 us apart; a kernel that writes the same bytes takes 2 to 3 us. So every
captured graph is instantiated here::

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, device):
        ...
    instantiate(graph, device)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from manyhands.backends.torch.kernels.nvrtc import Kernels, compile_file
from manyhands.errors import CannotCompile

KERNEL, MEMSET = 0, 2  # types of nodes
_ALLOCATIONS = (10, 11)  # allocating and freeing memory: nodes of a graph with these cannot be removed
_LONG = 1 << 16  # bytes
_THREADS = 128
_MOST_BLOCKS = 1024
_NEEDED = ("cuGraphAddDependencies_v2",)  # the youngest function, of CUDA 12.3: a driver may be older


class KernelNode(ctypes.Structure):
    """CUDA's description of a kernel in a graph (``CUDA_KERNEL_NODE_PARAMS_v2``)."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Memset(ctypes.Structure):
    """CUDA's description of a memset in a graph (``CUDA_MEMSET_NODE_PARAMS``)."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Edge(ctypes.Structure):
    """CUDA's description of an edge (``CUgraphEdgeData``): all zero if the second node simply waits."""

    _fields_ = (("ports", ctypes.c_ubyte * 2), ("kind", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5))


_WAITS = bytes(_Edge())


def instantiate(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Make a graph that was captured with ``keep_graph=True`` ready to be replayed.

    Returns how many memsets were replaced by kernels. If that is not possible, the graph stays as captured.
    """
    with torch.cuda.device(device):
        try:
            replaced = _replace_memsets(graph.raw_cuda_graph(), compile_file("fill.cu", device))
        except CannotCompile:  # no NVRTC, an old driver
            replaced = 0
        graph.instantiate()
    return replaced


def nodes_of(driver: ctypes.CDLL, graph: int, kind: int) -> Iterator[int]:
    """The nodes of one type."""
    node_type = ctypes.c_int()
    for node in _nodes(driver, graph):
        status = driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(node_type))
        if status == 0 and node_type.value == kind:
            yield node


def _replace_memsets(graph: int, kernels: Kernels) -> int:
    driver = kernels.driver
    if not all(hasattr(driver, name) for name in _NEEDED):
        return 0
    if any(True for kind in _ALLOCATIONS for _ in nodes_of(driver, graph, kind)):
        return 0
    return sum(_replace_memset(graph, node, kernels) for node in list(nodes_of(driver, graph, MEMSET)))


def _replace_memset(graph: int, node: int, kernels: Kernels) -> bool:
    """Replace a memset by a kernel that waits for the same nodes; False if the memset stays."""
    driver, settings = kernels.driver, _Memset()
    _check(driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(settings)))
    before = _neighbours(driver.cuGraphNodeGetDependencies_v2, node)
    after = _neighbours(driver.cuGraphNodeGetDependentNodes_v2, node)
    size = settings.width * settings.element_bytes
    if settings.height != 1 or before is None or after is None:
        return False
    if size > _LONG and settings.target % 16:  # the kernel would write it byte by byte
        return False
    pattern = _pattern(settings.value, settings.element_bytes)
    added = _add_fill(graph, kernels, before, settings.target, size, pattern)
    replaced = _connect(driver, graph, [(added, following) for following in after])
    # Remove one of the two: both would write, and nothing would wait for the kernel.
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node if replaced else added)))
    return replaced


def _add_fill(graph: int, kernels: Kernels, before: list[int], target: int, size: int, pattern: int) -> int:
    """Add a kernel that waits for the nodes in ``before`` and writes a pattern of four bytes repeatedly."""
    values = ctypes.c_uint64(target), ctypes.c_uint(pattern), ctypes.c_longlong(size)
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    blocks = min(max(1, -(-size // (16 * _THREADS))), _MOST_BLOCKS)
    grid, block = (ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(_THREADS, 1, 1)
    settings = KernelNode(kernels.function("fill").value, grid, block, 0, ctypes.addressof(arguments))
    added = ctypes.c_void_p()
    add = kernels.driver.cuGraphAddKernelNode_v2
    count = ctypes.c_size_t(len(before))
    _check(add(ctypes.byref(added), ctypes.c_void_p(graph), _handles(before), count, ctypes.byref(settings)))
    return added.value or 0


def _connect(driver: ctypes.CDLL, graph: int, edges: list[tuple[int, int]]) -> bool:
    """Make the second node of each pair wait for the first; False if the driver refuses."""
    first, second = (_handles([edge[end] for edge in edges]) for end in (0, 1))
    count = ctypes.c_size_t(len(edges))
    return not edges or driver.cuGraphAddDependencies_v2(ctypes.c_void_p(graph), first, second, None, count) == 0


def _nodes(driver: ctypes.CDLL, graph: int) -> list[int]:
    count = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    return [node for node in nodes if node is not None]


def _neighbours(ask: ctypes._NamedFuncPointer, node: int) -> list[int] | None:
    """The predecessors or successors of a node; None if an edge is not a plain wait."""
    count = ctypes.c_size_t()
    _check(ask(ctypes.c_void_p(node), None, None, ctypes.byref(count)))
    nodes, edges = (ctypes.c_void_p * count.value)(), (_Edge * count.value)()
    if count.value:
        _check(ask(ctypes.c_void_p(node), nodes, edges, ctypes.byref(count)))
    return None if any(bytes(edge) != _WAITS for edge in edges) else [neighbour or 0 for neighbour in nodes]


def _pattern(value: int, size: int) -> int:
    """Four bytes that repeat a value of ``size`` bytes."""
    return int.from_bytes(value.to_bytes(4, "little")[:size] * (4 // size), "little")


def _handles(nodes: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _check(status: int) -> None:
    if status:
        raise CannotCompile(f"CUDA's driver refuses to inspect or change a graph: error {status}")
