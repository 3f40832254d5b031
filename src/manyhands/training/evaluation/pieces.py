"""Outputs on their way to the host: trees of arrays with one row per sample, which come piece by piece.

A model answers batch by batch, with an array or with a tuple, a dict or a dataclass of arrays. Put together, the pieces
have the same structure, and each array has one row per sample of the data set, in its order::

    {"scores": (4, 10), "box": (4, 2)}  +  {"scores": (3, 10), "box": (3, 2)}  =  {"scores": (7, 10), "box": (7, 2)}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from manyhands import tree
from manyhands.amounts import counted
from manyhands.errors import BadBatch, type_in_words

_AT_ONCE = 512  # samples: evaluation keeps nothing for gradients
_TIMES = 8  # as many samples as a training step, where that takes few


def batch_size_for(batch_size: int) -> int:
    """How many samples to evaluate at once, where training processes this many."""
    return max(batch_size, min(_AT_ONCE, _TIMES * batch_size))


def whole_size(data: Any, batch_size: int) -> int:
    """The samples of a batch that a loss is to see as a whole: the data's own size, or that of training."""
    of_data: int | None = data.batch_size
    return batch_size if of_data is None else of_data


Join = Callable[[list[Any]], Any]  # the framework's concatenation along the first axis


class PendingOutputs:
    """What is still on its way to the host, handed on in order; the newest ``ahead`` are not waited for.

    ``deliver=None``: it is dropped.
    """

    def __init__(self, deliver: Callable[[Any], None] | None, ahead: int = 1) -> None:
        self._hand_on, self._ahead = deliver, ahead
        self._coming: deque[Any] = deque()

    def add(self, coming: Any) -> None:
        if self._hand_on is not None:
            self._coming.append(coming)
            self._hand_over(self._ahead)

    def finish(self) -> None:
        self._hand_over(0)

    def _hand_over(self, ahead: int) -> None:
        while self._hand_on is not None and len(self._coming) > ahead:
            self._hand_on(self._coming.popleft())


class Pieces:
    """Trees of arrays, kept until all of them are there."""

    def __init__(self, join: Join) -> None:
        self._join = join
        self._columns: list[list[Any]] = []
        self._structure: Any = None

    def add(self, piece: Any) -> None:
        leaves, structure = tree.flatten(piece)
        if self._structure is None:
            self._structure, self._columns = structure, [[] for _ in leaves]
        elif structure != self._structure:
            raise BadBatch(
                f"the model's outputs have another structure for some batches ({structure} after {self._structure}): "
                "they can be put together only if each batch gives the same"
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.append(leaf)

    def whole(self) -> Any:
        """All pieces as one tree; None where none has come."""
        if self._structure is None:
            return None
        return self._structure.unflatten(
            column[0] if len(column) == 1 else self._join(column) for column in self._columns
        )


def check_rows(outputs: Any, samples: int) -> None:
    """Refuse outputs that are not one row per sample: they could not be put together in the order of the data."""
    leaves, structure = tree.flatten(outputs)
    for leaf, path in zip(leaves, tree.paths(structure, "output"), strict=True):
        shape = getattr(leaf, "shape", None)
        if shape is None or not len(shape) or int(shape[0]) != samples:
            shown = f"{type_in_words(leaf)}" if shape is None else f"an array of shape {tuple(shape)}"
            raise BadBatch(
                f"the model answers {counted(samples, 'sample')} with {shown} ({path}): predictions and metrics need "
                "arrays with one row per sample. Let the model return only those in evaluation mode"
            )
