"""Only the first batches of a data set: ``Limits(limit_val_batches=10)``, or a part of them, ``0.1``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from manyhands.amounts import counted
from manyhands.errors import BadSettings
from manyhands.training.data import loader_batches


def as_number(limit: float | None, source: Any, batch_size: int, option: str) -> int | None:
    """A limit as a number of batches; None: all. ``1`` is one batch, ``1.0`` all, ``0.5`` half of them."""
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None
    if isinstance(limit, int):
        return limit
    batches = loader_batches.length(source) if source.count is None else -(-source.count // batch_size)
    if batches is None:
        raise BadSettings(
            f"{option}={limit:g} is a part of the batches, and the loader does not say how many it has (it has no "
            "__len__): give a number of batches"
        )
    number = math.floor(batches * limit + 1e-9)  # 0.29 * 100 is a little less than 29
    if not number:
        raise BadSettings(
            f"{option}={limit:g} of {counted(batches, 'batch', 'batches')} is none: give a number of batches, or at "
            f"least {1 / batches:.3g}"
        )
    return number


def first_batches(source: Any, limit: float | None, batch_size: int, option: str) -> Any:
    """The source with its first batches only: of a loader its own, else of ``batch_size`` samples each."""
    if source is None:
        return source
    batch_size = source.batch_size or batch_size
    batches = as_number(limit, source, batch_size, option)
    if batches is None:
        return source
    if source.count is None:
        return dataclasses.replace(source, loader=FirstBatches(source.loader, batches))
    return source.first(batches * batch_size) if batches * batch_size < source.count else source


class FirstBatches:
    """A loader that ends after this many batches; otherwise it is the one inside."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
