"""Divides a batch over the devices, evenly or by shares, with padding rows.

A step is one program over all devices, and each device holds the same number of rows. If samples are divided evenly,
the compiler cuts the batch itself, and pads it if it does not divide: ten samples on three devices are rows of four,
and the last two rows are padding. With shares, each device has its own number of samples, and every device as many rows
as the largest share; the rows left over repeat a sample of the batch, with weight zero::

    division(10, 2, [7, 3]).places    [0 1 2 3 4 5 6 | 7 8 9 0 0 0 0]
                           .weights   [1 1 1 1 1 1 1 | 1 1 1 0 0 0 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands import shares as _shares


@dataclass(frozen=True)
class Division:
    """For each row on the devices: which sample of the batch is there, and whether it counts.

    Without weights only rows at the very end do not count: those from ``size`` on.
    """

    size: int
    places: NDArray[np.int32]
    weights: NDArray[np.bool_] | None


def division(size: int, devices: int, shares: Sequence[float] | None) -> Division:
    sizes = _shares.sizes(size, devices, shares)
    rows = max(sizes)
    if shares is None or min(sizes) == rows:
        places = np.arange(-(-size // devices) * devices, dtype=np.int32)
        return Division(size, np.where(places < size, places, 0), None)
    firsts = np.cumsum([0, *sizes[:-1]])
    row = np.arange(rows)
    weights = row[None, :] < np.array(sizes)[:, None]
    places = np.where(weights, firsts[:, None] + row[None, :], 0).astype(np.int32)
    return Division(size, places.reshape(-1), weights.reshape(-1))
