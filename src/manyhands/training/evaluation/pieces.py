"""Outputs on their way to the host: trees of arrays with one row per sample, which come piece by piece.

A model answers batch by batch, with an array or with a tuple, a dict or a dataclass of arrays. Put together, the pieces
have the same structure, and each array has one row per sample of the data set, in its order::

    {"scores": (4, 10), "box": (4, 2)}  +  {"scores": (3, 10), "box": (3, 2)}  =  {"scores": (7, 10), "box": (7, 2)}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands import tree
from manyhands.errors import BadBatch

Join = Callable[[list[Any]], Any]  # the framework's concatenation along the first axis


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
            what = f"a {type(leaf).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
            raise BadBatch(
                f"the model answers {samples} samples with {what} ({path}): predictions and metrics need arrays with "
                "one row per sample. Let the model return only those in evaluation mode"
            )
