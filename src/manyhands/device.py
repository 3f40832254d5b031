"""Framework-neutral devices, for the core, the command and reports.

Users work with their framework's devices (``torch.device``, ``jax.Device``, ...). If one name must mean the same in all
frameworks (on a command line, in a table, in an error), it is a :class:`Device`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from manyhands.amounts import count_of
from manyhands.errors import BadDevice, DuplicateDevices, NoSuchDevice, VirtualDevicesError

Kind = Literal["cpu", "gpu", "virtual"]

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")  # whose devices these are; the first comes first

# Ours, and as the frameworks print their own: cuda:1, gpu(1), /device:GPU:1, /job:localhost/task:0/device:GPU:1.
_NAME = re.compile(r"(?:[\w/:]*/device:|/)?(?P<kind>[a-z]+)(?::(?P<index>[0-9]+)|\((?P<number>[0-9]+)\))?\Z")
_KINDS: dict[str, Kind] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "virtual": "virtual"}


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A place that holds tensors and computes: ``cpu``, ``gpu:0``, ``virtual:1``."""

    kind: Kind
    index: int = 0

    def __post_init__(self) -> None:
        check_index(self.index)

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" and self.index == 0 else f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read ``cpu`` (or ``cpu:0``: the host), ``gpu`` (that is ``gpu:0``), ``gpu:1``, ``virtual:1``.

        What a framework prints for its own devices is read too: ``cuda:1``, ``gpu(1)``, ``/device:GPU:1``.
        """
        match = _NAME.match(text.strip().lower())
        kind = _KINDS.get(match["kind"]) if match else None
        if match is None or kind is None:
            raise BadDevice(
                f"{text!r} is not the name of a device: write 'cpu', 'gpu' (the first), 'gpu:1' or 'virtual:1'"
            )
        return cls(kind, int(match["index"] or match["number"] or 0))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device's memory: the total, and what is free now."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What is known of one device, as :func:`devices` lists it; None is unknown."""

    device: Device
    name: str
    uuid: str | None
    memory: Memory | None
    capability: str | None

    @property
    def kind(self) -> Kind:
        return self.device.kind

    @property
    def index(self) -> int:
        return self.device.index


def check_index(index: object) -> int:
    """Return the index if it is valid, else raise an error that explains."""
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise BadDevice(f"a device is numbered 0, 1, 2, ...; {index!r} is not a number of that kind")
    number = cast(int, index).__index__()
    if number < 0:
        raise BadDevice(f"a device is numbered 0, 1, 2, ...; {number} is not one of these (no negative numbers)")
    return number


def no_such_device(framework: str, device: Device, gpus: Iterable[Device]) -> NoSuchDevice:
    """The error for a device that this machine does not have; it lists the CPU and the GPUs, or virtual devices."""
    names = ", ".join(map(str, [Device("cpu"), *gpus]))
    return NoSuchDevice(
        f"there is no {device}: {framework} sees {names}. mh.try_gpu({device.index}) falls back to the CPU"
    )


def too_late_for_virtual_devices(framework: str, starter: str, count: int) -> VirtualDevicesError:
    return VirtualDevicesError(
        f"it is too late to make {count_of(count, 'virtual device')}: {framework}'s runtime has started ({starter} "
        f"starts it). Set MANYHANDS_VIRTUAL_DEVICES={count} before Python starts, or call mh.virtual_devices({count}) "
        f"before {starter}"
    )


def check_distinct(names: list[str]) -> None:
    """Refuse an empty list of devices, and one that names a device twice."""
    if not names:
        raise BadDevice("the list of devices is empty: give at least one, for example try_all_gpus()")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DuplicateDevices(
            f"{', '.join(twice)} appears more than once in [{', '.join(names)}]: two replicas or shards on one device "
            "would be one and the same memory. Name each device once; for several devices on a machine "
            "without GPUs set MANYHANDS_VIRTUAL_DEVICES=2"
        )
