"""Which memsets of a CUDA graph come at its start, and that everything else keeps its order; on a graph of Python's."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.backends.torch.run.graphs import nodes as graph_nodes
from manyhands.backends.torch.run.graphs.nodes import KERNEL, MEMSET, Memset, may_move
from manyhands.backends.torch.run.graphs.workspaces import Workspace

WAITS, EARLY = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])
ROOM = 0x7000_0000
Fill = tuple[int, int, int]  # target, bytes, pattern


class Graph:
    """Stands in for CUDA's driver, and for the one graph that it has. It refuses the edges of some calls."""

    def __init__(self) -> None:
        self.kinds: dict[int, int] = {}
        self.fills: dict[int, Fill] = {}  # what memsets, and kernels that were added, write
        self.edges: dict[tuple[int, int], bytes] = {}
        self.refused: set[int] = set()  # numbers of calls
        self.calls = 0
        self.count = 0

    def add(self, *before: int, fill: Fill | None = None, edge: bytes = WAITS) -> int:
        self.count += 1
        node = self.count
        self.kinds[node] = KERNEL if fill is None else MEMSET
        if fill is not None:
            self.fills[node] = fill
        self.edges |= {(other, node): edge for other in before}
        return node

    def behind(self, node: int) -> set[int]:
        """Everything that waits for a node."""
        direct = {second for first, second in self.edges if first == node}
        return direct.union(*(self.behind(second) for second in direct))

    def order(self, nodes: set[int]) -> set[tuple[int, int]]:
        return {(first, second) for first in nodes for second in self.behind(first) & nodes}

    def memsets(self) -> set[int]:
        return {node for node, kind in self.kinds.items() if kind == MEMSET}

    def replaced(self, workspaces: list[Workspace]) -> int:
        kernels: Any = SimpleNamespace(driver=self, function=lambda _: ctypes.c_void_p(1))
        return graph_nodes._replace_memsets(1, kernels, workspaces)

    # What the driver is asked

    def cuGraphGetNodes(self, _: object, nodes: Any, count: Any) -> int:
        return self._list(sorted(self.kinds), nodes, count)

    def cuGraphGetRootNodes(self, _: object, nodes: Any, count: Any) -> int:
        return self._list(sorted({*self.kinds} - {second for _, second in self.edges}), nodes, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kinds[node.value]
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, settings: Any) -> int:
        target, size, value = self.fills[node.value]
        for name, number in {"target": target, "value": value, "element_bytes": 1, "width": size, "height": 1}.items():
            setattr(settings._obj, name, number)
        return 0

    def cuGraphNodeGetDependencies_v2(self, node: Any, nodes: Any, edges: Any, count: Any) -> int:
        return self._neighbours(
            {a: edge for (a, b), edge in self.edges.items() if b == node.value}, nodes, edges, count
        )

    def cuGraphNodeGetDependentNodes_v2(self, node: Any, nodes: Any, edges: Any, count: Any) -> int:
        return self._neighbours(
            {b: edge for (a, b), edge in self.edges.items() if a == node.value}, nodes, edges, count
        )

    def cuGraphAddKernelNode_v2(self, added: Any, _: object, before: Any, count: Any, settings: Any) -> int:
        places = ctypes.cast(settings._obj.arguments, ctypes.POINTER(ctypes.c_void_p))
        kinds = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_longlong)
        target, pattern, size = (kind.from_address(places[i] or 0).value for i, kind in enumerate(kinds))
        assert len(before) == count.value
        added._obj.value = node = self.add(*before)
        self.fills[node] = (target, size, pattern)
        return 0

    def cuGraphAddDependencies_v2(self, _: object, first: Any, second: Any, __: None, count: Any) -> int:
        self.calls += 1
        new = list(zip(first, second, strict=True))
        assert len(new) == count.value
        if self.calls in self.refused or len({*new}) < len(new) or any(edge in self.edges for edge in new):
            return 1
        self.edges |= dict.fromkeys(new, WAITS)
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:
        del self.kinds[node.value]
        self.edges = {edge: data for edge, data in self.edges.items() if node.value not in edge}
        return 0

    def _list(self, values: list[int], nodes: Any, count: Any) -> int:
        count._obj.value = len(values)
        if nodes is not None:
            nodes[:] = values
        return 0

    def _neighbours(self, values: dict[int, bytes], nodes: Any, edges: Any, count: Any) -> int:
        if edges is not None:
            for i, data in enumerate(values.values()):
                ctypes.memmove(ctypes.addressof(edges[i]), data, len(data))
        return self._list([*values], nodes, count)


def part(number: int, *before: int) -> Workspace:
    begin = ROOM + 512 * number
    return Workspace(begin, begin + 400, frozenset(before))


def inside(space: Workspace, size: int = 32) -> Fill:
    return space.begin + 16, size, 0


def test_a_memset_with_which_the_call_of_a_workspace_begins_may_move() -> None:
    space = part(0, 5, 6)
    memset = Memset(9, space.begin, 400, 0, frozenset({6, 5}))
    assert may_move([memset], [part(1), space]) == [memset]


@pytest.mark.parametrize(
    "memset",
    [
        Memset(9, ROOM, 401, 0, frozenset({5})),
        Memset(9, ROOM - 1, 32, 0, frozenset({5})),
        Memset(9, ROOM + 480, 64, 0, frozenset({5})),
        Memset(9, ROOM, 32, 0x01010101, frozenset({5})),
        Memset(9, ROOM, 32, 0, frozenset({5, 6})),
        Memset(9, ROOM, 32, 0, frozenset()),
        Memset(9, ROOM, 32, 0, None),
    ],
    ids=["too long", "before it", "across two", "not zero", "later", "elsewhere", "more than a wait"],
)
def test_other_memsets_stay(memset: Memset) -> None:
    assert may_move([memset], [part(0, 5), part(1, 5)]) == []


def chain(*, first_is_memset: bool = False) -> tuple[Graph, list[Workspace]]:
    """Two calls, with a kernel in between; the second one clears its workspace twice."""
    graph = Graph()
    last = () if first_is_memset else (graph.add(),)
    first = part(0, *last)
    middle = graph.add(graph.add(graph.add(*last, fill=inside(first))))
    second = part(1, middle)
    call = graph.add(graph.add(middle, fill=inside(second)))
    graph.add(graph.add(call, fill=inside(second)))
    return graph, [first, second]


@pytest.mark.parametrize("first_is_memset", [False, True])
def test_one_kernel_at_the_start(first_is_memset: bool) -> None:
    graph, spaces = chain(first_is_memset=first_is_memset)
    captured = {*graph.kinds} - graph.memsets()
    order = graph.order(captured)
    assert graph.replaced(spaces) == 3
    start, again = sorted({*graph.kinds} - captured)
    assert graph.fills[start] == (ROOM + 16, 512 + 32, 0)
    assert graph.behind(start) == {*graph.kinds} - {start}
    assert graph.fills[again] == inside(spaces[1])  # a kernel of the call may have written there
    assert graph.order(captured) == order
    assert len(graph.edges) == len(graph.kinds) - 1  # a chain has one node less


def test_a_single_memset_is_replaced_at_its_place() -> None:
    graph = Graph()
    first = graph.add()
    last = graph.add(graph.add(first, fill=inside(part(0, first))))
    assert graph.replaced([part(0, first)]) == 1
    (fill,) = {*graph.kinds} - {first, last}
    assert graph.edges == {(first, fill): WAITS, (fill, last): WAITS}


def test_an_edge_that_is_there_is_not_added_again() -> None:
    graph, spaces = Graph(), []
    node = graph.add()
    for number in range(2):
        spaces.append(part(number, node))
        memset = graph.add(node, fill=inside(spaces[-1]))
        node = graph.add(node, memset)
    assert graph.replaced(spaces) == 2
    assert sorted(graph.edges) == [(1, 3), (3, 5), (6, 1)]


def test_a_memset_beside_a_kernel_that_begins_early_stays_at_its_place() -> None:
    """The edge of that kernel is less than the wait for the memset was."""
    graph, spaces = Graph(), []
    node = graph.add()
    for number in range(2):
        spaces.append(part(number, node))
        memset, before = graph.add(node, fill=inside(spaces[-1])), node
        node = graph.add(memset)
    graph.edges[before, node] = EARLY
    assert graph.replaced(spaces) == 2
    assert graph.edges[before, node] == EARLY
    assert [fill for fill in graph.kinds if fill in graph.behind(before) and node in graph.behind(fill)] != []


@pytest.mark.parametrize("refused", range(1, 6))
def test_a_refusal_leaves_a_graph_that_clears_in_time(refused: int) -> None:
    graph, spaces = chain()
    graph.refused = {refused}
    captured = {*graph.kinds} - graph.memsets()
    order = graph.order(captured)
    graph.replaced(spaces)
    assert order <= graph.order(captured)
    for space, call in zip(spaces, (3, 6), strict=True):
        assert any(_clears(graph, node, space) and call in graph.behind(node) for node in graph.kinds)
    for node in {*graph.kinds} - captured:  # nothing clears a workspace while its call may be running
        for call, space in zip((3, 6), spaces, strict=True):
            touches = graph.fills[node][0] < space.end and space.begin < sum(graph.fills[node][:2])
            assert not touches or call in graph.behind(node) or node in graph.behind(call)


def _clears(graph: Graph, node: int, space: Workspace) -> bool:
    target, size, _ = inside(space)
    begin, length, pattern = graph.fills.get(node, (0, 0, 0))
    return begin <= target and target + size <= begin + length and pattern == 0


def random_graph(seed: int) -> tuple[Graph, list[Workspace]]:
    """Nodes that wait for any before them, with calls that clear a workspace or memory that is not theirs alone."""
    chance, graph, spaces = random.Random(seed), Graph(), list[Workspace]()
    for number in range(14):
        before = chance.sample(sorted(graph.kinds), min(chance.randrange(4), len(graph.kinds)))
        if chance.random() < 0.5:
            graph.add(*before)
            continue
        space = part(number, *before)
        memset = graph.add(*before, fill=inside(space))
        graph.add(memset, *(node for node in before if chance.random() < 0.3))
        if chance.random() < 0.7:
            spaces.append(space)
    return graph, spaces


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_keep_their_order(seed: int) -> None:
    graph, spaces = random_graph(seed)
    memsets = graph.memsets()
    captured = {*graph.kinds} - memsets
    order = graph.order(captured)
    around = {
        graph.fills[m]: (graph.behind(m) & captured, {n for n in captured if m in graph.behind(n)}) for m in memsets
    }
    moving = may_move([Memset(m, *graph.fills[m], _before(graph, m)) for m in memsets], spaces)
    assert graph.replaced(spaces) == len(memsets)
    assert graph.order(captured) == order
    assert not graph.memsets()
    added = {*graph.kinds} - captured
    if len(moving) > 1:
        (start,) = (node for node in added if graph.behind(node) == {*graph.kinds} - {node})
        assert all(_clears(graph, start, space) for space in spaces)
        added -= {start}
        assert len(added) == len(memsets) - len(moving)
    else:
        assert len(added) == len(memsets)
    for node in added:
        behind, before = around[graph.fills[node]]
        assert graph.behind(node) & captured == behind
        assert {n for n in captured if node in graph.behind(n)} == before


def _before(graph: Graph, node: int) -> frozenset[int]:
    return frozenset(first for first, second in graph.edges if second == node)
