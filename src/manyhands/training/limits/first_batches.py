"""Only the first batches of a data set: ``Limits(limit_val_batches=10)``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any


def first_batches(source: Any, batches: int | None, batch_size: int) -> Any:
    """The source with its first batches only: so many of a loader, or as many samples as they have."""
    if source is None or batches is None:
        return source
    if source.count is None:
        return dataclasses.replace(source, loader=FirstBatches(source.loader, batches))
    return source.first(batches * batch_size) if batches * batch_size < source.count else source


class FirstBatches:
    """A loader that ends after so many batches; otherwise it is the one inside."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
