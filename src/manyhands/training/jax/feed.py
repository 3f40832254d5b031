"""Brings each batch to the devices: gathered there, if the data fit, else on the host and sent.

Sending is not waited for: the host gathers the next batch while the devices work.

A step is one program over all devices, and each device holds the same number of rows. Where a batch does not divide,
rows that repeat its first sample fill up the last device's part; the program leaves them out::

    places(10, 3)    [0 1 2 3 | 4 5 6 7 | 8 9 0 0]
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from manyhands import machine
from manyhands.backends.jax import devices as backend
from manyhands.training.data.order import Window
from manyhands.training.data.sources import Arrays, Source
from manyhands.training.jax.world import World

_MOST = 0.25  # of the memory that is free


def places(size: int, devices: int) -> NDArray[np.int32]:
    """For each row on the devices, which sample of the batch is there; those from ``size`` on only fill up."""
    rows = np.arange(-(-size // devices) * devices, dtype=np.int32)
    return np.where(rows < size, rows, 0)


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


def rows_of(source: Arrays, order: NDArray[np.int64], window: Window, world: World) -> Any:
    """A batch of the epoch's order, gathered on the host and sent in parts."""
    numbers = order[window.start : window.stop][places(window.size, len(world.devices))]
    return tuple(world.put(rows, in_parts=True) for rows in source.rows(numbers))


def sent(parts: tuple[NDArray[Any], ...], size: int, world: World) -> Any:
    """A batch of a loader's, sent in parts."""
    return tuple(world.put(part[places(size, len(world.devices))], in_parts=True) for part in parts)
