"""Brings each batch to the devices: gathered there, if the data fit, else on the host and sent.

Sending is not waited for: the host gathers the next batch while the devices work.

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
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from manyhands import machine
from manyhands.backends.jax import devices as backend
from manyhands.shares import sizes as sizes_of
from manyhands.training.data.order import Window
from manyhands.training.data.sources import Arrays, Source
from manyhands.training.jax.world import World

_MOST = 0.25  # of the memory that is free


@dataclass(frozen=True)
class Division:
    """For each row on the devices: which sample of the batch is there, and whether it counts.

    Without weights only rows at the very end do not count: those from ``size`` on.
    """

    size: int
    places: NDArray[np.int32]
    weights: NDArray[np.bool_] | None


def division(size: int, devices: int, shares: Sequence[float] | None) -> Division:
    sizes = sizes_of(size, devices, shares)
    rows = max(sizes)
    if shares is None or min(sizes) == rows:
        places = np.arange(-(-size // devices) * devices, dtype=np.int32)
        return Division(size, np.where(places < size, places, 0), None)
    firsts = np.cumsum([0, *sizes[:-1]])
    row = np.arange(rows)
    weights = row[None, :] < np.array(sizes)[:, None]
    places = np.where(weights, firsts[:, None] + row[None, :], 0).astype(np.int32)
    return Division(size, places.reshape(-1), weights.reshape(-1))


def resident(source: Source | None, world: World) -> tuple[jax.Array, ...] | None:
    """The arrays of a source on every device, if it has some and they fit there well."""
    if not isinstance(source, Arrays):
        return None
    local = [device for device in world.devices if device.process_index == world.rank]
    records = [backend.describe(device).memory for device in local]
    if world.platform == "cpu":  # all of them share the host's
        records, needed = [machine.host_memory()], source.nbytes * len(local)
    else:
        needed = source.nbytes
    if any(memory is not None and memory.free is not None and needed > _MOST * memory.free for memory in records):
        return None
    return tuple(map(world.put, source.arrays))


def rows_of(source: Arrays, order: NDArray[np.int64], window: Window, division: Division, world: World) -> Any:
    """A batch of the epoch's order, gathered on the host and sent in parts."""
    numbers = order[window.start : window.stop][division.places]
    return tuple(world.put(rows, in_parts=True) for rows in source.rows(numbers))


def sent(parts: tuple[NDArray[Any], ...], division: Division, world: World) -> Any:
    """A batch of a loader's, sent in parts."""
    return tuple(world.put(part[division.places], in_parts=True) for part in parts)
