"""Derivatives of gradients, ``create_graph=True``, through a planned piece.

PyTorch's compiled backward pass cannot be derived again: it raises an error. A program that asks for it works without
us, so it has to work with us: where a backward pass is recorded, the piece's forward pass is done again as Dynamo
captured it, operation by operation, and PyTorch derives that. Random numbers are those that were drawn; what the piece
writes to without a gradient (running averages) is written to in a copy.

A piece's results are the outputs of one node of PyTorch's graph, whose class is made for that piece. Its ``backward``
is replaced, and what it needs is kept with each node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_KEY = "manyhands"


@dataclass(frozen=True)
class _Again:
    """What it takes to do a forward pass again."""

    forward: Callable[..., Sequence[Any]]
    arguments: tuple[Any, ...]
    outputs: dict[int, int]  # the node's outputs, by number, among the results
    places: tuple[int | None, ...]  # for each of the node's inputs the argument that it is
    draw_again: Callable[[], None] | None  # begins with the random numbers that were drawn


def can_be_derived(
    results: Sequence[Any],
    forward: Callable[..., Sequence[Any]],
    arguments: tuple[Any, ...],
    draw_again: Callable[[], None] | None,
) -> None:
    """Let the gradients of these results be derived again; they came from ``forward`` in another way."""
    nodes: dict[int, Any] = {
        id(one.grad_fn): one.grad_fn for one in results if isinstance(one, torch.Tensor) and one.grad_fn is not None
    }
    for node in nodes.values():
        kind = getattr(node, "_forward_cls", None)
        if kind is None or len(node.next_functions) != len(arguments):
            continue  # a view of a result, say
        edges = {
            tuple(get_gradient_edge(one))[:2]: number
            for number, one in enumerate(arguments)
            if isinstance(one, torch.Tensor) and one.requires_grad
        }
        places = tuple(edges.get((function, number)) for function, number in node.next_functions)
        outputs = {one.output_nr: number for number, one in enumerate(results) if getattr(one, "grad_fn", None) is node}
        node.metadata[_KEY] = _Again(forward, arguments, outputs, places, draw_again)
        if not hasattr(kind, "_derived_again"):
            kind._derived_again = True
            kind.backward = staticmethod(_deriving(kind.backward))


def _deriving(backward: Callable[..., Any]) -> Callable[..., Any]:
    def either(node: Any, *gradients: Any) -> Any:
        again = node.metadata.get(_KEY) if torch.is_grad_enabled() else None
        if again is None:
            return backward(node, *gradients)
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        return _derive(again, gradients[0] if boxed else gradients)

    return either


def _derive(again: _Again, gradients: Sequence[Any]) -> tuple[Any, ...]:
    wanted = [number for number in again.places if number is not None]
    given = [one if not isinstance(one, torch.Tensor) or one.requires_grad else one.clone() for one in again.arguments]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        if again.draw_again is not None:
            again.draw_again()
        results = again.forward(*given)
    pairs = [
        (results[again.outputs[number]], gradient)
        for number, gradient in enumerate(gradients)
        if gradient is not None and number in again.outputs and results[again.outputs[number]].requires_grad
    ]
    found = torch.autograd.grad(
        [result for result, _ in pairs],
        [given[number] for number in wanted],
        [gradient for _, gradient in pairs],
        create_graph=True,
        allow_unused=True,
    )
    by_argument = dict(zip(wanted, found, strict=True))
    return tuple(None if number is None else by_argument[number] for number in again.places)
