"""Seeds of attention without dropout are zeros in a forward graph; with dropout they are the operation's."""

from __future__ import annotations

import operator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx import Graph, GraphModule  # noqa: E402

from manyhands.backends.torch.dynamo.attention_seeds import define_seeds  # noqa: E402

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def graph_of(operation: Any, arguments: tuple[Any, ...], seeds: tuple[int, ...], **options: Any) -> GraphModule:
    """A forward graph that returns the operation's result, and its seeds."""
    graph = Graph()
    queries = [graph.placeholder(name) for name in "qkv"]
    node = graph.call_function(operation, (*queries, *arguments), options)
    results = [graph.call_function(operator.getitem, (node, number)) for number in (0, *seeds)]
    for result in results:
        result.meta["val"] = torch.empty(2, dtype=torch.int64, device="meta")
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph)


def results_of(module: GraphModule) -> list[Any]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return [node.target for node in output.args[0]]


@pytest.mark.parametrize(
    ("operation", "arguments", "seeds", "options"),
    [
        (FLASH, (), (6, 7), {}),
        (FLASH, (0.0, True), (6, 7), {"scale": 0.5}),
        (EFFICIENT, (None, True, 0.0), (2, 3), {}),
        (EFFICIENT, (None, True), (2, 3), {"is_causal": True}),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True), (6, 7), {}),
    ],
)
def test_without_dropout(operation: Any, arguments: Any, seeds: Any, options: Any) -> None:
    module = define_seeds(graph_of(operation, arguments, seeds, **options))
    assert results_of(module) == [operator.getitem, aten.full.default, aten.full.default]


@pytest.mark.parametrize(
    ("operation", "arguments", "seeds"), [(FLASH, (0.1,), (6, 7)), (EFFICIENT, (None, True, 0.5), (2, 3))]
)
def test_with_dropout(operation: Any, arguments: Any, seeds: Any) -> None:
    module = graph_of(operation, arguments, seeds)
    assert define_seeds(module) is module
