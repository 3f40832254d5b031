"""A table of names: how the weights of a user's own model in one framework become those of its twin in another.

A JSON file. For every weight of the new model it says which weight of the run it is, and what is done to it on the way,
step by step::

    {
      "names": {
        "conv.kernel":  ["conv.weight", {"permute": [2, 3, 1, 0]}],
        "conv.bias":    "conv.bias",
        "dense.kernel": ["dense.weight", {"reshape": [3, 2, 4, 4]}, {"permute": [2, 3, 1, 0]}, {"reshape": [32, 3]}],
        "dense.bias":   "dense.bias",
        "norm.count":   {"zeros": [], "dtype": "int64"}
      },
      "unused": ["norm.num_batches_tracked"]
    }

``"transpose"`` turns all axes round. Every weight of the run has to be used or listed under ``unused``: what is
forgotten is an error that names it. NumPy only.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.amounts import counted
from manyhands.errors import BadSettings, WrongCheckpoint

Tensors = dict[str, NDArray[Any]]
_FORM = 'a table is {"names": {"new name": "old name", ...}, "unused": ["old name", ...]}'
_ENTRY = (
    'give the old name, ["old name", "transpose"], ["old name", {"permute": [2, 3, 1, 0]}, {"reshape": [32, 3]}], or '
    '{"zeros": [3], "dtype": "int64"}'
)


@dataclass(frozen=True)
class NamesTable:
    """Which weight of the old model each weight of the new one is, and the old ones that have no place there."""

    names: Mapping[str, Any]
    unused: Sequence[str] = field(default=())

    @classmethod
    def read(cls, path: Path) -> NamesTable:
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise BadSettings(f"--names {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise BadSettings(f"--names {path} is not JSON ({error}): {_FORM}") from error
        return cls.of(content)

    @classmethod
    def of(cls, content: Any) -> NamesTable:
        """A table from parsed JSON."""
        names = content.get("names") if isinstance(content, Mapping) else None
        unused = content.get("unused", []) if isinstance(content, Mapping) else None
        if not isinstance(names, Mapping) or not names or not isinstance(unused, list):
            raise BadSettings(f"this is not a table of names: {_FORM}")
        return cls(names, unused)

    def converted(self, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
        """The weights of the new model; an error names weights that are missing, left over or of another shape."""
        renamed = {name: _converted(name, entry, tensors) for name, entry in self.names.items()}
        used = {_old_name(entry) for entry in self.names.values()} | set(self.unused)
        if left := [name for name in tensors if name not in used]:
            raise WrongCheckpoint(
                f'the table does not map {_listed(left, tensors)}: give each a place under "names", '
                'or list it under "unused"'
            )
        return renamed


def check_like(tensors: Mapping[str, NDArray[Any]], like: Mapping[str, NDArray[Any]]) -> None:
    """Refuse weights that another run's model would not take."""
    if missing := [name for name in like if name not in tensors]:
        raise WrongCheckpoint(f"the table gives nothing for {_listed(missing, like)} of the new model")
    if extra := [name for name in tensors if name not in like]:
        raise WrongCheckpoint(f"the new model has no {_listed(extra, tensors)}{_meant(extra[0], like)}")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape:
            raise WrongCheckpoint(
                f"{name} comes out with shape {list(tensor.shape)}, and the new model has {list(like[name].shape)}: "
                f"add a step, {_ENTRY}"
            )


def _converted(name: str, entry: Any, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    if isinstance(entry, Mapping) and "zeros" in entry:
        return np.zeros(entry["zeros"], entry.get("dtype", "float32"))
    old = _old_name(entry)
    if old is None:
        raise BadSettings(f"the table has {name!r}: {json.dumps(entry)}: {_ENTRY}")
    if old not in tensors:
        raise WrongCheckpoint(
            f"the table takes {name!r} from {old!r}, and the run holds no such weight{_meant(old, tensors)}. It holds "
            f"{_listed(tensors, tensors)}"
        )
    tensor = tensors[old]
    for step in [] if isinstance(entry, str) else entry[1:]:
        tensor = _changed(tensor, step, f"{name!r} from {old!r}")
    return np.ascontiguousarray(tensor)


def _old_name(entry: Any) -> str | None:
    if isinstance(entry, str):
        return entry
    return entry[0] if isinstance(entry, list) and entry and isinstance(entry[0], str) else None


def _changed(tensor: NDArray[Any], step: Any, where: str) -> NDArray[Any]:
    shape = list(tensor.shape)
    if step == "transpose":
        return tensor.T
    kind, numbers = next(iter(step.items())) if isinstance(step, Mapping) and len(step) == 1 else (None, None)
    if kind not in ("permute", "reshape") or not isinstance(numbers, list):
        raise BadSettings(f"{where}: the step {json.dumps(step)} is not known: {_ENTRY}")
    if kind == "permute":
        if sorted(numbers) != list(range(tensor.ndim)):
            raise WrongCheckpoint(
                f"{where}: permute {numbers} does not fit the shape {shape}, which has "
                f"{counted(tensor.ndim, 'axis', 'axes')}"
            )
        return tensor.transpose(numbers)
    if math.prod(numbers) != tensor.size:
        raise WrongCheckpoint(
            f"{where}: reshape {numbers} has {counted(math.prod(numbers), 'number')}, and the shape {shape} has "
            f"{tensor.size:,}"
        )
    return tensor.reshape(numbers)


def _listed(names: Iterable[str], tensors: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{name} {list(tensors[name].shape)}" for name in names)


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
