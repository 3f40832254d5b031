"""The public verbs, written once for all frameworks: ``to``, ``copy``, ``split``, ``gather``, ``devices`` and so on.

``manyhands.torch``, ``.jax``, ``.tensorflow`` and ``.mxnet`` are :class:`Verbs` bound to one framework's adapter. The
verbs take and return the framework's own tensors, devices and models; a device may also be named (``"gpu:1"``). Two
rules hold for all of them: what is already in place is returned unchanged, and after every placement the framework is
asked where the tensor really is.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar, overload

from manyhands import shares as _shares
from manyhands import tree
from manyhands.amounts import count_of
from manyhands.backends.protocol import Arrival, Backend, D, Devices, M, T
from manyhands.device import Device, DeviceRecord, Memory, check_index
from manyhands.errors import (
    BadBatch,
    DeviceError,
    DeviceMismatch,
    NotATensor,
    SeveralDevices,
    VirtualDevicesError,
    type_in_words,
)
from manyhands.placement.moves import VIRTUAL_DEVICES, Placement, once_each

X = TypeVar("X")


class VirtualDevices(list[D]):
    """The virtual devices, a list. ``with`` ends at its end what the call has made; inside, a call makes nothing new.

    >>> with mh.virtual_devices(2) as devices: ...     # doctest: +SKIP
    """

    def __init__(self, backend: Devices[D], count: int, *, created: bool) -> None:
        super().__init__(map(backend.gpu, range(count)))
        self._backend, self._created = backend, created

    def __enter__(self) -> VirtualDevices[D]:
        if self._created and not self._backend.CAPABILITIES.virtual_can_end:
            raise VirtualDevicesError(
                f"{self._backend.name} cannot undo virtual devices, so a with block cannot end them: call "
                "mh.virtual_devices(n) without 'with'"
            )
        if not self._backend.virtual_count():
            raise VirtualDevicesError("these virtual devices are gone: call mh.virtual_devices(n) for the new block")
        return self

    def __exit__(self, *error: object) -> None:
        if self._created:
            self._backend.end_virtual_devices()


class Verbs(Generic[T, D, M]):
    """The verbs of one framework."""

    def __init__(self, backend: Backend[T, D, M]) -> None:
        self._backend = backend
        self._place = Placement(backend)
        wanted = os.environ.get(VIRTUAL_DEVICES, "").strip()
        if wanted:
            if not wanted.isdecimal():
                raise VirtualDevicesError(
                    f"the environment variable {VIRTUAL_DEVICES} is a number of devices, {wanted!r} is not"
                )
            if int(wanted):
                self.virtual_devices(int(wanted))

    # Names

    def cpu(self) -> D:
        """The host's CPU."""
        return self._backend.cpu()

    def gpu(self, i: int = 0) -> D:
        """GPU number ``i``, whether or not it exists; :func:`try_gpu` falls back to the CPU.

        Using a GPU that does not exist raises ``NoSuchDevice``. JAX has no object for one: there this call raises it.
        """
        return self._backend.gpu(check_index(i))

    def num_gpus(self) -> int:
        """How many GPUs there are (virtual devices, where those stand in for them)."""
        return self._backend.num_gpus()

    def try_gpu(self, i: int = 0) -> D:
        """GPU number ``i`` if it exists, else the CPU."""
        return self.gpu(i) if check_index(i) < self.num_gpus() else self.cpu()

    def try_all_gpus(self) -> list[D]:
        """All GPUs, or ``[cpu()]`` where there is none."""
        return [self.gpu(i) for i in range(self.num_gpus())] or [self.cpu()]

    def devices(self) -> list[DeviceRecord]:
        """A record of every device: the CPU first, then the GPUs or virtual devices.

        Where the host and virtual device 0 are one place (all but PyTorch) it is listed under both names.
        """
        host = dataclasses.replace(self._backend.describe(self.cpu()), device=Device("cpu"))
        return [host, *(self._backend.describe(self.gpu(i)) for i in range(self.num_gpus()))]

    def memory(self, device: D | Device | str) -> Memory:
        """The device's memory in bytes: ``memory(d).total``, ``memory(d).free``."""
        record = self._backend.describe(self._place.find(device))
        if record.memory is None:
            raise DeviceError(
                f"{self._backend.name} does not report the memory of {record.device}, nor does the driver: "
                "pip install 'manyhands[gpu]' makes it available"
            )
        return record.memory

    def virtual_devices(self, n: int, *, as_cuda: bool | None = None) -> VirtualDevices[D]:
        """Make ``n`` devices out of the host's CPU; they stand in for GPUs from now on, or within a ``with``.

        The same as ``MANYHANDS_VIRTUAL_DEVICES=n`` in the environment. JAX and TensorFlow need to hear of it before
        their runtime starts, that is before the first tensor, and cannot undo it. Blocks may be nested, and end in the
        thread that began them; threads that are started inside know the devices.

        In PyTorch its own names mean these devices too: ``x.cuda(1)``, ``torch.device("cuda:1")``, ``torch.cuda.*``,
        ``nn.DataParallel``. So code written for GPUs runs as it stands (docs/virtual-devices.md). Where PyTorch has a
        real GPU those names are left alone, unless ``as_cuda=True`` asks for it; ``as_cuda=False`` leaves them alone
        everywhere, and the devices are called ``cpu:0``, ``cpu:1``.
        """
        if isinstance(n, bool) or not hasattr(n, "__index__") or not 1 <= n.__index__() <= 64:
            raise VirtualDevicesError(f"{n!r} virtual devices cannot be made: ask for 1 to 64")
        if as_cuda is not None and not self._backend.CAPABILITIES.virtual_as_cuda:
            raise VirtualDevicesError(f"as_cuda={as_cuda} is for PyTorch: {self._backend.name} has no torch.cuda")
        count, have = n.__index__(), self._backend.virtual_count()
        if have not in (0, count):
            raise VirtualDevicesError(
                f"this process has {count_of(have, 'virtual device')} already, their number cannot change to {count}: "
                "leave the with block that made them, or start a new process"
            )
        if not have:
            self._backend.virtual_devices(count, as_cuda=as_cuda)
            words = "virtual CPU device stands in for a GPU" if count == 1 else "virtual CPU devices stand in for GPUs"
            print(f"manyhands: {count} {words} in {self._backend.name}", file=sys.stderr)
        return VirtualDevices(self._backend, count, created=not have)

    # Placement

    def device_of(self, x: object) -> D:
        """The one device that a tensor, a tree of tensors or a model is on."""
        backend = self._backend
        if backend.is_tensor(x):
            return backend.device_of(x)
        placed = self._place.placements("x", x)
        if not placed:
            raise NotATensor(
                f"{type_in_words(x)} has no device: there is no tensor of {backend.name} in it. "
                "A model whose parameters are not made yet has none either"
            )
        different = {str(backend.neutral(device)): device for _, device in placed}
        if len(different) > 1:
            raise SeveralDevices(
                f"not on one device but on {len(different)}:\n{self._place.list_of(placed)}\n"
                "Move it to one first: x = mh.to(x, device)"
            )
        return placed[0][1]

    @overload
    def to(self, x: X, device: D | Device | str, *, wait: Literal[True] = True) -> X: ...

    @overload
    def to(self, x: X, device: D | Device | str, *, wait: Literal[False]) -> Arrival[X]: ...

    @overload
    def to(self, x: X, device: D | Device | str, *, wait: bool) -> X | Arrival[X]: ...

    def to(self, x: X, device: D | Device | str, *, wait: bool = True) -> X | Arrival[X]:
        """Move a tensor, a tree or a model to a device.

        What is already there is returned unchanged: ``to(x, d) is x``. Tensors of a tree that have to move are copied;
        leaves that are not tensors stay the same objects. A model is moved in place.

        In JAX a sharding is a place, too: ``to(x, NamedSharding(mesh, PartitionSpec("rows")))``.

        ``wait=False`` starts the move and returns an :class:`Arrival`, whose ``result()`` is the value.
        """
        backend = self._backend
        native: D = device if backend.is_device(device) else self._place.find_name(device)  # type: ignore[arg-type]
        if not wait:
            return self._place.start_move(x, self._place.find(native))
        if backend.is_tensor(x):
            if backend.is_on(x, native):
                return x  # type: ignore[return-value]
            return self._place.move(x, self._place.find(native))  # type: ignore[return-value]
        values = tree.plain_leaves(x)
        if values and backend.all_on(values, native):
            return x
        self._place.find(native)
        leaves, structure = tree.flatten(x)
        move = once_each(functools.partial(self._place.to_leaf, native=native))
        moved = [move(leaf) for leaf in leaves]
        if all(new is old for new, old in zip(moved, leaves, strict=True)):
            return x
        return structure.unflatten(moved)  # type: ignore[return-value]

    def copy(self, x: X, device: D | Device | str | None = None) -> X:
        """New memory with the same content, also where it is on that device already.

        Without a device each tensor is copied where it is.
        """
        target = None if device is None else self._place.find(device)

        def duplicate(leaf: object) -> object:
            if not self._place.is_tensor(leaf):
                self._place.refuse_model(leaf, "copy.deepcopy(net), then mh.to(net, device)")
                return leaf
            where = self._backend.device_of(leaf) if target is None else target
            return self._place.verify(self._backend.copy(leaf, where), where)

        return tree.map_leaves(once_each(duplicate), x)  # type: ignore[no-any-return]

    def check_same_device(self, /, *xs: object, **named: object) -> D | None:
        """Raise :class:`DeviceMismatch` unless all tensors in the arguments are on one device.

        The error names each of them with its device, and the line to write instead. Worth a call in
        front of code that mixes tensors: TensorFlow copies and MXNet computes across devices in
        silence. Returns the device (None if there is no tensor at all).
        """
        arguments = {**{f"argument {i}": x for i, x in enumerate(xs)}, **named}
        placed = [pair for root, x in arguments.items() for pair in self._place.placements(root, x)]
        if not placed:
            return None
        neutral = [str(self._backend.neutral(device)) for _, device in placed]
        # At equal numbers, the tensors on the CPU are those that were forgotten.
        most = max(dict.fromkeys(neutral), key=lambda name: (neutral.count(name), name != "cpu"))
        if neutral.count(most) == len(neutral):
            return placed[0][1]
        wrong = [path for (path, _), name in zip(placed, neutral, strict=True) if name != most]
        root = next(name for name in arguments if wrong[0] == name or wrong[0].startswith((name + "[", name + ".")))
        variable = root if root in named else "x"
        target = most if most.startswith("cpu") else most.replace("virtual", "gpu")
        raise DeviceMismatch(
            f"tensors that must be on one device are on {len(set(neutral))}:\n{self._place.list_of(placed)}\n"
            f'Write {variable} = mh.to({variable}, "{target}") before'
            + (f" (where {variable} is {root})" if variable != root else "")
        )

    def synchronize(self, device: D | Device | str | None = None) -> None:
        """Wait for everything in flight on a device, or on all of them.

        Errors of asynchronous work surface here at the latest.
        """
        self._backend.synchronize(None if device is None else self._place.find(device))

    def waitall(self) -> None:
        """Wait for all tasks given in parallel scopes, and for everything in flight on all devices."""
        from manyhands.tasks import scope  # here and not above: who has no tasks need not wait for the import

        scope.waitall()
        self.synchronize()

    # Batches

    def split(self, batch: X, devices: Sequence[D | Device | str], shares: Sequence[float] | None = None) -> list[X]:
        """Cut a batch (a tensor or a tree of tensors) into one shard per device, each placed there.

        The shards stand in order and are together exactly the batch. Sizes are as even as can be, or
        follow ``shares`` (largest remainder). With more devices than samples some shards are empty. A
        shard on the device of the batch is a part of it, not a copy. Leaves that are not tensors are
        in every shard.
        """
        natives = self._place.distinct(devices)
        leaves, structure = tree.flatten(batch)
        lengths = self._place.lengths(leaves, structure)
        total = lengths[0][1]
        if total == 0:
            raise BadBatch("the batch is empty: there is nothing to split")
        shards, start = [], 0
        for native, size in zip(natives, _shares.sizes(total, len(natives), shares), strict=True):
            shards.append(structure.unflatten(self._place.shard(leaf, start, start + size, native) for leaf in leaves))
            start += size
        return shards  # type: ignore[return-value]

    def gather(self, shards: Sequence[X], device: D | Device | str) -> X:
        """Put shards together again on one device: the inverse of :func:`split`.

        Leaves that are not tensors must be the same in all shards, as :func:`split` makes them.
        """
        if self._backend.is_tensor(shards) or not isinstance(shards, Sequence) or isinstance(shards, str):
            raise BadBatch(f"a list of shards is needed, as mh.split returns it; this is {type_in_words(shards)}")
        if not shards:
            raise BadBatch("there are no shards to put together")
        native = self._place.find(device)
        flat = [tree.flatten(shard) for shard in shards]
        structure = flat[0][1]
        if any(other != structure for _, other in flat):
            raise BadBatch("the shards differ in structure: they are not parts of one batch")
        columns = zip(tree.paths(structure, "shard"), *(leaves for leaves, _ in flat), strict=True)
        return structure.unflatten(self._place.join(path, column, native) for path, *column in columns)  # type: ignore[return-value]
