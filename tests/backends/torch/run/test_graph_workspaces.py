"""Workspaces of captured graphs, with captures that are made up: each has its part of its own graph's arena."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.backends.torch.run.graphs import workspaces as graph_workspaces
from manyhands.backends.torch.run.graphs.workspaces import arena_for_workspaces, workspace, workspaces_of

CPU = torch.device("cpu")


class Graph:
    """Any object can have an arena."""


class Captures:
    """Stands in for CUDA's driver: which capture the current stream belongs to, and the last nodes on it."""

    def __init__(self, number: int = 7, nodes: tuple[int, ...] = ()) -> None:
        self.number, self.nodes, self.answer = number, nodes, 0

    def cuStreamGetCaptureInfo_v3(self, _: object, state: Any, number: Any, graph: Any, nodes: Any, *rest: Any) -> int:
        edges, count = rest
        assert edges is None
        state._obj.value, number._obj.value, graph._obj.value = int(self.number > 0), self.number, 1
        count._obj.value = len(self.nodes)
        self.array = (ctypes.c_void_p * len(self.nodes))(*self.nodes)
        nodes._obj.contents = ctypes.cast(self.array, ctypes.POINTER(ctypes.c_void_p)).contents
        return self.answer


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    driver = Captures()
    monkeypatch.setattr(graph_workspaces, "cuda_driver", lambda: driver)
    monkeypatch.setattr(graph_workspaces, "_asked", threading.Event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.number > 0)
    workspace(1, CPU)  # as a first run before a capture does
    return driver


def test_parts_do_not_overlap_and_are_aligned(captures: Captures) -> None:
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        parts = []
        for number, size in enumerate([1, 600, 512, 65536]):
            captures.nodes = tuple(range(1, number + 1))
            parts.append(workspace(size, CPU))
    spaces = workspaces_of(graph)
    assert [len(part) for part in parts] == [1, 600, 512, 65536]
    assert [(part.data_ptr(), part.data_ptr() + len(part)) for part in parts] == [(s.begin, s.end) for s in spaces]
    assert [space.begin - spaces[0].begin for space in spaces] == [0, 512, 1536, 2048]
    assert [space.before for space in spaces] == [{*()}, {1}, {1, 2}, {1, 2, 3}]


def test_what_is_large_or_empty_or_finds_the_room_full_is_allocated(captures: Captures) -> None:
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        assert [len(workspace(size, CPU)) for size in (0, 65537)] == [1, 65537]
        sizes = [len(workspace(65536, CPU)) for _ in range(20)]
    assert sizes == [65536] * 20
    assert len(workspaces_of(graph)) == (1 << 20) // 65536


def test_a_call_gets_a_part_of_the_graph_that_it_is_captured_in(captures: Captures) -> None:
    """Whatever thread it comes from, and while other graphs are being captured."""
    graphs: list[Any] = [Graph(), Graph()]
    with arena_for_workspaces(graphs[0], CPU):
        captures.number = 8
        with arena_for_workspaces(graphs[1], CPU):
            workspace(100, CPU)
            captures.number = 7
            for _ in range(2):
                thread = threading.Thread(target=workspace, args=(100, CPU))
                thread.start()
                thread.join()
            captures.number = 9  # somebody's
            workspace(100, CPU)
            captures.number = 0  # none
            workspace(100, CPU)
    assert [len(workspaces_of(graph)) for graph in graphs] == [2, 1]


def test_no_room_where_nothing_asks_for_workspaces(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_workspaces, "_asked", threading.Event())
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        workspace(100, CPU)
    assert not workspaces_of(graph)


def test_no_room_where_new_memory_is_filled(captures: Captures) -> None:
    """The fill would come after the start of the graph."""
    captures.nodes = (1,)
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        workspace(100, CPU)
    assert not workspaces_of(graph)


def test_no_part_where_the_driver_does_not_say_what_comes_before(captures: Captures) -> None:
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        captures.answer = 1
        assert len(workspace(100, CPU)) == 100
    assert not workspaces_of(graph)


def test_without_the_drivers_function_workspaces_are_allocated(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_workspaces, "_QUERY", "cuThatDoesNotExist")
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        assert len(workspace(100, CPU)) == 100
    assert not workspaces_of(graph)


def test_a_room_lives_as_long_as_its_graph(captures: Captures) -> None:
    graph: Any = Graph()
    with arena_for_workspaces(graph, CPU):
        workspace(100, CPU)
    arena = weakref.ref(graph_workspaces._arena_of[graph])
    assert arena() is not None
    del graph
    gc.collect()
    assert arena() is None


def test_a_capture_that_fails_leaves_nothing(captures: Captures) -> None:
    graph: Any = Graph()

    def fail() -> None:
        workspace(100, CPU)
        raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"), arena_for_workspaces(graph, CPU):
        fail()
    assert not graph_workspaces._arenas
    assert not workspaces_of(graph)
