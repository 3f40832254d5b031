"""Finds the nodes of a captured CUDA graph before it is instantiated, and replaces memsets by kernels.

cuDNN clears a few bytes of its workspace before many convolutions. In a CUDA graph that is a memset node, and on an
H200 it keeps the kernels around it 8 to 11 us apart; a kernel that writes the same bytes takes 2 to 3 us. So every
captured graph is instantiated here::

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, device):
        ...
    instantiate(graph, device)

Dozens of such kernels still add up, though they write little. If a call has a workspace to itself
(:mod:`.workspaces`) and begins with the memset, nothing earlier in the graph writes there. So the memset can run at
the start of the graph, where one kernel does the work of all of them::

    captured:      copy -> memset 1 -> convolution 1 -> norm -> memset 2 -> convolution 2
    instantiated:  fill 1 and 2 -> copy -> convolution 1 -> norm -> convolution 2

The kernel is a node of the graph, so it clears the workspaces on every replay, whatever the last replay left there. It
clears everything from the first workspace to the last: between them are only other workspaces, whose contents do not
matter before their calls. All other memsets become kernels at their places.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from manyhands.backends.torch.kernels.nvrtc import Kernels, compiled
from manyhands.backends.torch.run.graphs.workspaces import Workspace, workspaces_of
from manyhands.errors import CannotCompile

KERNEL, MEMSET = 0, 2  # types of nodes
_ALLOCATIONS = (10, 11)  # allocating and freeing memory: nodes of a graph with these cannot be removed
_LONG = 1 << 16  # bytes
_THREADS = 128
_MOST_BLOCKS = 1024
_WORTH = 2  # memsets: moving a single one to the start of a graph gains nothing
_NEEDED = (  # of CUDA's driver, to replace a node
    "cuGraphGetNodes",
    "cuGraphGetRootNodes",
    "cuGraphNodeGetType",
    "cuGraphMemsetNodeGetParams",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetDependentNodes_v2",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddDependencies_v2",
    "cuGraphDestroyNode",
)


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


@dataclass(frozen=True, slots=True)
class Memset:
    """A memset of contiguous bytes; ``before``: the nodes that it waits for, None if an edge is not a plain wait."""

    node: int
    target: int
    size: int
    pattern: int
    before: frozenset[int] | None


def instantiate(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Make a graph that was captured with ``keep_graph=True`` ready to be replayed.

    Returns how many memsets were replaced by kernels, at their places or at the start of the graph. If that is not
    possible, the graph stays as captured.
    """
    with torch.cuda.device(device):
        try:
            replaced = _replace_memsets(graph.raw_cuda_graph(), compiled("fill.cu", device), workspaces_of(graph))
        except CannotCompile:  # no NVRTC, an old driver
            replaced = 0
        graph.instantiate()
    return replaced


def nodes_of(driver: ctypes.CDLL, graph: int, kind: int) -> Iterator[int]:
    """The nodes of one type."""
    node_type = ctypes.c_int()
    for node in _listed(driver.cuGraphGetNodes, graph):
        status = driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(node_type))
        if status == 0 and node_type.value == kind:
            yield node


def may_move(memsets: Iterable[Memset], workspaces: Sequence[Workspace]) -> list[Memset]:
    """The memsets that may move to the start of the graph: they write zeros, and a workspace's call begins with them.

    A later memset of the same call stays: an earlier kernel of the call may have written there.
    """
    return [
        memset
        for memset in memsets
        if memset.pattern == 0
        and any(
            space.begin <= memset.target and memset.target + memset.size <= space.end and memset.before == space.before
            for space in workspaces
        )
    ]


def _replace_memsets(graph: int, kernels: Kernels, workspaces: Sequence[Workspace]) -> int:
    driver = kernels.driver
    if not all(hasattr(driver, name) for name in _NEEDED):
        return 0
    if any(True for kind in _ALLOCATIONS for _ in nodes_of(driver, graph, kind)):
        return 0
    moved = _move_to_start(graph, kernels, workspaces) if workspaces else 0
    return moved + sum(_replace_memset(graph, node, kernels) for node in list(nodes_of(driver, graph, MEMSET)))


def _move_to_start(graph: int, kernels: Kernels, workspaces: Sequence[Workspace]) -> int:
    """Replace memsets of workspaces by one kernel at the start; returns how many.

    The kernel is added first, then the memsets are removed one by one. If the driver refuses a removal, the graph is
    still right, because clearing twice does no harm.
    """
    driver = kernels.driver
    memsets = [_memset(driver, node) for node in nodes_of(driver, graph, MEMSET)]
    moving = may_move([memset for memset in memsets if memset is not None], workspaces)
    if len(moving) < _WORTH:
        return 0
    roots = _listed(driver.cuGraphGetRootNodes, graph)
    begin = min(memset.target for memset in moving) // 16 * 16  # still in the workspace, which is aligned
    end = max(memset.target + memset.size for memset in moving)
    start = _add_fill(graph, kernels, [], begin, end - begin, 0)
    if not _connect(driver, graph, [(start, root) for root in roots]):
        _check(driver.cuGraphDestroyNode(ctypes.c_void_p(start)))
        return 0
    return sum(_remove(driver, graph, memset.node) for memset in moving)


def _remove(driver: ctypes.CDLL, graph: int, node: int) -> bool:
    """Remove a node and connect its successors to its predecessors; False if it stays."""
    before = _neighbours(driver.cuGraphNodeGetDependencies_v2, node)
    after = _neighbours(driver.cuGraphNodeGetDependentNodes_v2, node)
    if before is None or after is None:
        return False
    new = []
    for first in before:
        edges = _edges(driver.cuGraphNodeGetDependentNodes_v2, first)
        if any(second in after and edge != _WAITS for second, edge in edges):  # such a node may start early
            return False
        behind = {second for second, _ in edges}  # CUDA refuses duplicate edges
        new += [(first, second) for second in after if second not in behind]
    if not _connect(driver, graph, new):
        return False
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node)))
    return True


def _replace_memset(graph: int, node: int, kernels: Kernels) -> bool:
    """Replace a memset by a kernel; False if the memset stays."""
    driver, memset = kernels.driver, _memset(kernels.driver, node)
    after = _neighbours(driver.cuGraphNodeGetDependentNodes_v2, node)
    if memset is None or memset.before is None or after is None:
        return False
    if memset.size > _LONG and memset.target % 16:  # the kernel would write it byte by byte
        return False
    added = _add_fill(graph, kernels, list(memset.before), memset.target, memset.size, memset.pattern)
    replaced = _connect(driver, graph, [(added, following) for following in after])
    # Remove one of the two: both would write, and nothing would wait for the kernel.
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node if replaced else added)))
    return replaced


def _memset(driver: ctypes.CDLL, node: int) -> Memset | None:
    """The memset of a node; None if it writes more than one row."""
    settings = _Memset()
    _check(driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(settings)))
    if settings.height != 1:
        return None
    before = _neighbours(driver.cuGraphNodeGetDependencies_v2, node)
    size, pattern = settings.width * settings.element_bytes, _pattern(settings.value, settings.element_bytes)
    return Memset(node, settings.target, size, pattern, None if before is None else frozenset(before))


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


def _listed(ask: ctypes._NamedFuncPointer, graph: int) -> list[int]:
    """The nodes that a function of the driver lists."""
    count = ctypes.c_size_t()
    _check(ask(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(ask(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    return [node for node in nodes if node is not None]


def _neighbours(ask: ctypes._NamedFuncPointer, node: int) -> list[int] | None:
    """The predecessors or successors of a node; None if an edge is not a plain wait."""
    edges = _edges(ask, node)
    return None if any(edge != _WAITS for _, edge in edges) else [neighbour for neighbour, _ in edges]


def _edges(ask: ctypes._NamedFuncPointer, node: int) -> list[tuple[int, bytes]]:
    """The predecessors or successors of a node, with CUDA's description of the edges."""
    count = ctypes.c_size_t()
    _check(ask(ctypes.c_void_p(node), None, None, ctypes.byref(count)))
    nodes, edges = (ctypes.c_void_p * count.value)(), (_Edge * count.value)()
    if count.value:
        _check(ask(ctypes.c_void_p(node), nodes, edges, ctypes.byref(count)))
    return [(neighbour or 0, bytes(edge)) for neighbour, edge in zip(nodes, edges, strict=True)]


def _pattern(value: int, size: int) -> int:
    """Four bytes that repeat a value of ``size`` bytes."""
    return int.from_bytes(value.to_bytes(4, "little")[:size] * (4 // size), "little")


def _handles(nodes: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _check(status: int) -> None:
    if status:
        raise CannotCompile(f"CUDA's driver refuses to inspect or change a graph: error {status}")
