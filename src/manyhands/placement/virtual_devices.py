"""How long a process has virtual devices: to its end, or to the end of the last ``with`` block that uses them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from manyhands.amounts import counted
from manyhands.backends.protocol import D, Devices
from manyhands.errors import VirtualDevicesError

X = TypeVar("X")


class VirtualDevices(list[X]):
    """The virtual devices, a list. ``with`` undoes at its end what the call has made.

    >>> with mh.virtual_devices(2) as devices: ...     # doctest: +SKIP
    """

    def __init__(self, devices: Iterable[X], holders: VirtualDeviceHolders[X], *, created: bool) -> None:
        super().__init__(devices)
        self._holders, self._created = holders, created

    def __enter__(self) -> VirtualDevices[X]:
        self._holders.enter(created=self._created)
        self._created = False
        return self

    def __exit__(self, *error: object) -> None:
        self._holders.leave()


class _ThreadState(threading.local):
    """The blocks that a thread is in."""

    blocks = 0


class VirtualDeviceHolders(Generic[D]):
    """Makes virtual devices when they are first asked for, and undoes it when the last ``with`` block ends.

    Blocks may be nested and may overlap in several threads. Devices that were asked for without a ``with`` stay.
    """

    def __init__(self, backend: Devices[D]) -> None:
        self._backend = backend
        self._lock = threading.RLock()
        self._blocks = 0
        self._here = _ThreadState()
        self._stays = False

    def ask(self, count: int, as_cuda: bool | None) -> VirtualDevices[D]:
        with self._lock:
            have = self._backend.virtual_count()
            if have not in (0, count):
                raise VirtualDevicesError(
                    f"this process has {counted(have, 'virtual device')} already, their number cannot change to "
                    f"{count}: "
                    f"{'leave the with block first' if self._blocks and not self._stays else 'start a new process'}"
                )
            if not have:
                self._backend.virtual_devices(count, as_cuda=as_cuda)
                self._stays = True
                words = "virtual CPU devices stand in for GPUs"
                if count == 1:
                    words = "virtual CPU device stands in for a GPU"
                print(f"manyhands: {count} {words} in {self._backend.name}", file=sys.stderr)
            return VirtualDevices(map(self._backend.gpu, range(count)), self, created=not have)

    def enter(self, *, created: bool) -> None:
        """A block begins; ``created``: its own call has made the devices, so that they end with the last block."""
        if created and not self._backend.CAPABILITIES.virtual_can_end:
            raise VirtualDevicesError(
                f"{self._backend.name} cannot undo virtual devices, so a with block cannot end them: call "
                "mh.virtual_devices(n) without 'with'"
            )
        with self._lock:
            if not self._backend.virtual_count():
                raise VirtualDevicesError(
                    "these virtual devices are gone: call mh.virtual_devices(n) for the new block"
                )
            if not created and not self._here.blocks:
                self._backend.enter_virtual_block()
            self._blocks += 1
            self._here.blocks += 1
            if created:
                self._stays = False

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            self._here.blocks -= 1
            if self._stays:
                return
            if not self._blocks:
                self._backend.end_virtual_devices()
            elif self._here.blocks <= 0:
                self._backend.leave_virtual_block()
