"""Nested batches: dicts of features, lists of targets, weights for each output.

A source holds a flat tuple of arrays, which is all that order, shards and devices need. Its structure says what the
tuple was before, and puts it together again for the model::

    structure = Structure()
    structure.flat(({"a": A, "b": B}, y))      # (A, B, y)
    structure.nested((rows_a, rows_b, rows_y))  # ({"a": rows_a, "b": rows_b}, rows_y)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands import tree
from manyhands.errors import BadBatch


class Structure:
    """The structure of a data set's batches: that of the first one, which all others must have too.

    ``dicts``: a batch may be a dict with its target in it, ``{"image": X, "label": y}``. It is then a tuple of one.
    """

    def __init__(self, *, dicts: bool = False) -> None:
        self.dicts = dicts
        self._spec: tree.Structure | None = None

    def flat(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays of a batch."""
        arrays, spec = tree.flatten(tuple(batch))
        if self._spec is None:
            self._spec = spec
        elif self._spec != spec:
            raise BadBatch(
                f"a batch has the parts {_shown(spec)}, and the one before it had {_shown(self._spec)}: give every "
                "batch the same parts"
            )
        return tuple(arrays)

    def nested(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """A batch of these arrays, as the user's batches are."""
        if self._spec is None:
            return tuple(arrays)
        batch: Any = self._spec.unflatten(arrays)
        return tuple(batch)


def is_nested(part: Any) -> bool:
    """Whether a part of a batch has parts itself."""
    return isinstance(part, (Mapping, list, tuple))


def _shown(spec: tree.Structure) -> str:
    return str(spec.unflatten(["*"] * spec.num_leaves)).replace("'*'", "*")
