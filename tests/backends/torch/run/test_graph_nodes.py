"""Memsets of a CUDA graph become kernels, and everything keeps its order; on a graph that stands in for CUDA's."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.backends.torch.run import graph_nodes
from manyhands.backends.torch.run.graph_nodes import KERNEL, MEMSET

WAITS, EARLY = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])
FILL = (0x7000_0000, 32, 0)
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

    def replaced(self) -> int:
        kernels: Any = SimpleNamespace(driver=self, function=lambda _: ctypes.c_void_p(1))
        return graph_nodes._replace_memsets(1, kernels)

    # What the driver is asked

    def cuGraphGetNodes(self, _: object, nodes: Any, count: Any) -> int:
        return self._list(sorted(self.kinds), nodes, count)

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


def test_a_memset_is_replaced_at_its_place() -> None:
    graph = Graph()
    first = graph.add()
    last = graph.add(graph.add(first, fill=FILL))
    assert graph.replaced() == 1
    (kernel,) = {*graph.kinds} - {first, last}
    assert graph.edges == {(first, kernel): WAITS, (kernel, last): WAITS}
    assert graph.fills[kernel] == FILL


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_memset_with_more_than_a_wait_stays(place: str) -> None:
    graph = Graph()
    first = graph.add()
    memset = graph.add(first, fill=FILL)
    last = graph.add(memset)
    graph.edges[(first, memset) if place == "before" else (memset, last)] = EARLY
    assert graph.replaced() == 0
    assert graph.memsets() == {memset}


@pytest.mark.parametrize("refused", [1, 2])
def test_a_refusal_leaves_one_of_the_two(refused: int) -> None:
    graph = Graph()
    node, captured = graph.add(), set[int]()
    for _ in range(2):
        captured.add(node)
        node = graph.add(graph.add(node, fill=FILL))
    captured.add(node)
    order = graph.order(captured)
    graph.refused = {refused}
    assert graph.replaced() == 1
    assert len(graph.memsets()) == 1
    assert len(graph.kinds) == 5
    assert graph.order(captured) == order


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_keep_their_order(seed: int) -> None:
    """Nodes that wait for any before them; half of them are memsets."""
    chance, graph = random.Random(seed), Graph()
    for number in range(14):
        before = chance.sample(sorted(graph.kinds), min(chance.randrange(4), len(graph.kinds)))
        fill = (0x7000_0000 + 512 * number, 32, 0) if chance.random() < 0.5 else None
        graph.add(*before, fill=fill)
    memsets = graph.memsets()
    captured = {*graph.kinds} - memsets
    order = graph.order(captured)
    around = {graph.fills[m]: _around(graph, m, captured) for m in memsets}
    assert graph.replaced() == len(memsets)
    assert not graph.memsets()
    assert graph.order(captured) == order
    assert {graph.fills[n]: _around(graph, n, captured) for n in {*graph.kinds} - captured} == around


def _around(graph: Graph, node: int, captured: set[int]) -> tuple[set[int], set[int]]:
    """The captured nodes behind a node, and those before it."""
    return graph.behind(node) & captured, {other for other in captured if node in graph.behind(other)}
