"""The devices of a job, and the processes that drive them.

One process drives all devices of a machine, as one mesh. With a launcher's environment (:mod:`..launcher`) there are
several processes, and the mesh is over the devices of all of them; every process then runs the same program, and JAX
lets arrays span them. JAX must know the other processes before its first array, so importing ``manyhands.jax`` joins
them.

Batches are gathered on the devices, if the data fit, else on the host and sent. Sending is not waited for: the host
gathers the next batch while the devices work. A step is one program over all devices, and each device holds the same
number of rows. Where a batch does not divide, rows that repeat its first sample fill up the last device's part; the
program leaves them out::

    places(10, 3)    [0 1 2 3 | 4 5 6 7 | 8 9 0 0]
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from manyhands import machine
from manyhands.backends.jax import devices as backend
from manyhands.errors import BadSettings
from manyhands.training import launcher
from manyhands.training.data.sources import Arrays, Source

_AXIS = "data"
_JOINED = "MANYHANDS_JAX_JOINED"  # in the environment: children of this process are no processes of the job
_TOO_LATE = "must be called before"
_MOST = 0.25  # of the memory that is free


def join() -> None:
    """Become one process of the job that a launcher has set up, if there is one and JAX has not started yet."""
    if launcher.size() < 2 or jax.distributed.is_initialized() or _JOINED in os.environ:
        return
    place = launcher.place()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    port = place.port + 1 if place.port < 2**16 - 1 else place.port - 1  # its own: torchrun listens on the first
    try:
        jax.distributed.initialize(
            f"{place.address}:{port}",
            place.size,
            place.rank,
            local_device_ids=[place.local_rank] if place.local_size > 1 and not place.sees_own_gpus else None,
        )
    except RuntimeError as error:
        if _TOO_LATE not in str(error):
            raise
        return  # said when there is something to train: see check
    os.environ[_JOINED] = str(os.getpid())


def check() -> None:
    """Refuse to train alone where a launcher wanted several."""
    if launcher.size() > 1 and jax.process_count() != launcher.size():
        raise BadSettings(
            f"the environment (WORLD_SIZE) names {launcher.size()} processes, and JAX knows {jax.process_count()}: it "
            "must know them before it starts. Import manyhands.jax before the first array, or call "
            "jax.distributed.initialize yourself"
        )


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh that the caller has set (``jax.set_mesh``): a job has its own, which may differ in size."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    left: contextlib.AbstractContextManager[Any] = jax.set_mesh(Mesh(np.empty((), dtype=object), ()))
    return left


class World:
    """A mesh over all devices of a job, and how arrays are laid out on it."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """``devices`` are this process's; the other processes use those of the same numbers."""
        kinds = sorted({device.platform for device in devices})
        if len(kinds) > 1:
            raise BadSettings(f"devices of several kinds ({', '.join(kinds)}): all devices of a job run one program")
        self.rank, self.size = jax.process_index(), jax.process_count()
        self.devices = list(devices) if self.size == 1 else _of_all_processes(devices)
        self.platform = devices[0].platform
        mesh = Mesh(np.array(self.devices), (_AXIS,), axis_types=(AxisType.Auto,))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.in_parts = NamedSharding(mesh, PartitionSpec(_AXIS))
        self._under_way: collections.deque[Any] = collections.deque()
        self._local_devices = [device for device in self.devices if device.process_index == self.rank]

    @functools.cached_property
    def in_flight(self) -> int:
        """How many programs may be under way.

        On CPU devices a step holds a thread of XLA's pool per device until all of them have met. Steps that were
        issued ahead can take the threads that the first one waits for: on two cores two devices then deadlock.
        """
        if self.platform != "cpu":
            return 16
        limit = os.environ.get("NPROC", "")
        threads = int(limit) if limit.isdecimal() else machine.usable_cores()
        return 2 if len(self.devices) == 1 or threads >= 4 * len(self.devices) else 1

    def make_room(self) -> None:
        """Wait for an earlier program, not the last one: otherwise they would be queued without end."""
        while len(self._under_way) >= self.in_flight:
            jax.block_until_ready(self._under_way.popleft())  # manyhands: wait-ok newer steps keep the devices busy

    def started(self, result: Any) -> None:
        """A program was started, and this is its result."""
        self._under_way.append(result)

    def put(self, array: Any, *, in_parts: bool = False) -> jax.Array:
        """An array that every process has, on every device: the whole of it, or one part each."""
        host, sharding = np.asarray(array), self.in_parts if in_parts else self.everywhere
        if self.size == 1:
            return jax.device_put(host, sharding)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def number(self, value: float, dtype: Any = None) -> jax.Array:
        """A number on every device; sent, but not waited for."""
        return self.put((dtype or (np.float64 if jax.config.jax_enable_x64 else np.float32))(value))

    def put_copy(self, tree: Any) -> Any:
        """A tree of arrays on every device, each in separate memory, so that a step can take it (donation)."""

        def copy_leaf(array: Any) -> jax.Array:
            # A copy for each device: on a CPU an array may be the very memory that it was made of.
            parts = [jax.device_put(np.array(array), device) for device in self._local_devices]
            return jax.make_array_from_single_device_arrays(parts[0].shape, self.everywhere, parts)

        return jax.tree.map(copy_leaf, tree)

    def divide(self, tree: Any) -> Any:
        """Inside a step: divide every array of the tree over the devices, by its first dimension.

        With 64-bit numbers an array that does not divide evenly is whole on every device: XLA aborts the process where
        such numbers are the indices of a lookup (of an embedding) that is divided unevenly. Seen with jaxlib 0.10.
        """

        def divide(leaf: Any) -> Any:
            if not leaf.ndim:
                return leaf
            whole = jax.config.jax_enable_x64 and len(leaf) % len(self.devices)
            return jax.lax.with_sharding_constraint(leaf, self.everywhere if whole else self.in_parts)

        return jax.tree.map(divide, tree)

    def all_have(self, number: int) -> bool:
        """Whether every process has this number (32 bits)."""
        if self.size == 1:
            return True
        jax.block_until_ready([*self._under_way])  # on CPU devices they could take the threads that this needs
        return bool((np.asarray(multihost_utils.process_allgather(np.uint32(number))) == number).all())


def from_first(data: bytes) -> bytes:
    """The bytes that the first process has."""
    if jax.process_count() == 1:
        return data
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    sent = np.frombuffer(data, np.uint8) if jax.process_index() == 0 else np.zeros(length, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent)).astype(np.uint8))


def _of_all_processes(devices: Sequence[jax.Device]) -> list[jax.Device]:
    platform = devices[0].platform
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices(platform):
        by_process.setdefault(device.process_index, []).append(device)
    numbers = [by_process[jax.process_index()].index(device) for device in devices]
    fewest = min(map(len, by_process.values()))
    if max(numbers) >= fewest:
        raise BadSettings(f"this process trains on its devices {numbers}, but another one has only {fewest}")
    return [by_process[process][number] for process in sorted(by_process) for number in numbers]


# Batches


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


def sent(arrays: tuple[NDArray[Any], ...], rows: NDArray[np.int64], world: World) -> Any:
    """A batch of these rows, gathered on the host and sent in parts."""
    numbers = rows[places(len(rows), len(world.devices))]
    return tuple(world.put(array[numbers], in_parts=True) for array in arrays)
