"""Backward passes through a planned piece that PyTorch's compiled backward pass refuses, or does differently.

What works without manyhands must work with it, with the same results. Three cases differ:

- A pass is differentiated again (``create_graph=True``). Compiled passes refuse that.
- A pass runs a second time without ``retain_graph=True``. Plain execution refuses that only if an operation on the way
  has saved a tensor: through ``(x + w).sum()`` any number of passes can go.
- A pass begins at some of the results. Weights that only other results depend on get no gradient then; a compiled pass
  gives them zeros, and an optimizer would move them.

In these cases the forward pass of the piece runs again as Dynamo captured it, operation by operation, and PyTorch
differentiates that. It uses the same random numbers, and writes running averages to a copy. Before a second pass the
earlier passes are repeated, so that PyTorch itself says whether a saved tensor is missing. Which weights some results
do not reach is found out once, and used in later passes of the piece.

A piece's results are the outputs of one node of PyTorch's graph, whose class is made for that piece. Its ``backward``
is replaced, and what it needs is kept with each node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import write_count

_KEY = "manyhands"
_WRITTEN = (
    "A second derivative through a function that manyhands plans in pieces needs its arguments as they were, and one "
    "of them has been written to since. Write to a copy, or derive before you write."
)
_SECOND_TIME = "backward through the graph a second time"  # in PyTorch's error


@dataclass
class _Forward:
    """What is needed to run a forward pass again."""

    function: Callable[..., Sequence[Any]]
    arguments: tuple[Any, ...]
    outputs: dict[int, int]  # the node's outputs, by number, among the results
    places: tuple[int | None, ...]  # for each of the node's inputs the argument that it is
    redraw: Callable[[], None] | None  # restores the random numbers of the first run
    watched: list[tuple[torch.Tensor, int]]  # arguments that the results depend on, and how often they were written to
    # Which of the node's outputs had gradients, in each backward pass since the last one that kept the graph.
    passes: list[frozenset[int]] = field(default_factory=list)

    def note_pass(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called before a backward pass, when PyTorch has not yet replaced missing gradients by zeros."""
        self.passes.append(frozenset(number for number, gradient in enumerate(gradients) if gradient is not None))

    @property
    def is_unchanged(self) -> bool:
        """Whether the arguments were not written to since the forward pass."""
        return all(write_count(argument) == count for argument, count in self.watched)


def allow_more_backward_passes(
    results: Sequence[Any],
    forward: Callable[..., Sequence[Any]],
    arguments: tuple[Any, ...],
    redraw: Callable[[], None] | None,
    statistics: frozenset[int] = frozenset(),
) -> None:
    """Let backward passes through results be differentiated and repeated; ``forward`` is their function as written.

    ``statistics`` are the numbers of arguments that only running averages are written to.
    """
    watched = [
        (tensor, write_count(tensor))
        for number, tensor in enumerate(arguments)
        if isinstance(tensor, torch.Tensor) and number not in statistics and not tensor.is_inference()
    ]
    nodes: dict[int, Any] = {
        id(tensor.grad_fn): tensor.grad_fn
        for tensor in results
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None
    }
    for node in nodes.values():
        kind = compat.function_class(node)
        if kind is None or len(node.next_functions) != len(arguments):
            continue  # a view of a result, say
        edges = {
            tuple(get_gradient_edge(tensor))[:2]: number
            for number, tensor in enumerate(arguments)
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        }
        places = tuple(edges.get((function, number)) for function, number in node.next_functions)
        outputs = {
            tensor.output_nr: number
            for number, tensor in enumerate(results)
            if getattr(tensor, "grad_fn", None) is node
        }
        known = node.metadata[_KEY] = _Forward(forward, arguments, outputs, places, redraw, watched)
        node.register_prehook(known.note_pass)
        if not hasattr(kind, "_allows_more_backward_passes"):
            kind._allows_more_backward_passes = True
            kind.backward = staticmethod(_either(kind.backward, {}))


def _either(backward: Callable[..., Any], missing: dict[frozenset[int], list[bool]]) -> Callable[..., Any]:
    """The compiled backward pass, or the pass as written if that one refuses.

    ``missing`` says for passes that begin at some of the results which gradients they do not have.
    """

    def either(node: Any, *gradients: Any) -> Any:
        known: _Forward | None = node.metadata.get(_KEY)
        if known is None:
            return backward(node, *gradients)
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)
        incoming = list(gradients[0] if boxed else gradients)  # the compiled pass empties the list
        if torch.is_grad_enabled():
            if not known.is_unchanged:
                raise RuntimeError(_WRITTEN)
            return _differentiated(known, [(dict(enumerate(incoming)), True)])
        reached = known.passes[-1]
        if reached not in missing and not known.outputs.keys() <= reached and known.is_unchanged and _has_saved(node):
            with torch.enable_grad():
                gradients_as_written = _differentiated(
                    known, [({number: incoming[number] for number in reached}, False)]
                )
            missing[reached] = [gradient is None for gradient in gradients_as_written]
            return gradients_as_written
        try:
            outgoing = backward(node, *gradients)
        except RuntimeError as error:
            if _SECOND_TIME not in str(error):
                raise
            return _repeated(known, incoming, error)
        del known.passes[:-1]  # earlier passes have kept the graph
        if reached in missing:
            return tuple(None if gone else gradient for gradient, gone in zip(outgoing, missing[reached], strict=True))
        return outgoing

    return either


def _has_saved(node: Any) -> bool:
    """Whether the tensors saved for the backward pass still exist."""
    try:
        node.saved_tensors  # noqa: B018 - it raises
    except RuntimeError:
        return False
    return True


def _repeated(known: _Forward, gradients: Sequence[Any], error: RuntimeError) -> tuple[Any, ...]:
    """One more pass through a graph that was freed; raises the error if plain execution does, too."""
    *earlier, reached = known.passes
    passes = [(dict.fromkeys(outputs), False) for outputs in earlier]
    try:
        with torch.enable_grad():
            return _differentiated(known, [*passes, ({number: gradients[number] for number in reached}, False)])
    except Exception:
        raise error from None


def _differentiated(known: _Forward, passes: Sequence[tuple[dict[int, Any], bool]]) -> tuple[Any, ...]:
    """The gradients of the last pass. A pass is its gradients by output (None: any), and whether it is recorded."""
    wanted = [number for number in known.places if number is not None]
    inputs = [_own_input(argument) for argument in known.arguments]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        if known.redraw is not None:
            known.redraw()
        results = known.function(*inputs)
    derivatives: Sequence[Any] = ()
    for gradients, recorded in passes:
        pairs = [
            (result, gradient)
            for number, gradient in gradients.items()
            if number in known.outputs and (result := results[known.outputs[number]]).requires_grad
        ]
        if recorded:
            pairs = [(result, gradient) for result, gradient in pairs if gradient is not None]
        derivatives = torch.autograd.grad(
            [result for result, _ in pairs],
            [inputs[number] for number in wanted],
            [torch.zeros_like(result) if gradient is None else gradient for result, gradient in pairs],
            create_graph=recorded,
            allow_unused=True,
        )
    by_argument = dict(zip(wanted, derivatives, strict=True))
    return tuple(None if number is None else by_argument[number] for number in known.places)


def _own_input(argument: Any) -> Any:
    """An argument for another run of the forward pass.

    Each gets a node of its own in PyTorch's graph. One argument may have been computed from another: its derivative
    must not go on through what lies between them, which the pass around this one does.
    """
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.view_as(argument) if argument.requires_grad else argument.clone()
