"""What ``devices=`` means: a number, a text or a list. ``--devices`` on the command line takes the same texts.

``docs/training.md`` has a table of them. ``["virtual:0", "virtual:1"]``, as ``device_names`` gives it for ``"cpu:2"``,
is ``"cpu:2"`` again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from manyhands import machine
from manyhands.amounts import count_of
from manyhands.backends.protocol import Backend
from manyhands.device import Device
from manyhands.errors import BadDevice, NoSuchDevice

VirtualCpus = Callable[[int], dict[str, Any]]
_MOST_OF_CPU = 64
_ALL_GPUS = ("gpu", "cuda", "all", "auto", "-1")
_WRITE = "Write gpu (all of them), 2 (that many), gpu:0,gpu:1, cpu, or cpu:2 for two virtual CPU devices"
_NO_GPU = "there is no GPU here, so the job is on the CPU"


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen devices, other options of the trainer that they need, and a note for the user."""

    devices: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


def missing_gpus(wanted: int, available: int) -> str | None:
    """A note for ``num_gpus=`` where there are fewer.

    >>> missing_gpus(2, 0), missing_gpus(2, 1), missing_gpus(1, 1)
    ('num_gpus=2: there is no GPU here, so the job is on the CPU', 'num_gpus=2: there is 1 GPU here', None)
    """
    if available >= wanted:
        return None
    there = "there is 1 GPU here" if available == 1 else f"there are {available} GPUs here"
    return f"num_gpus={wanted}: {there if available else _NO_GPU}"


def resolve(devices: Any, backend: Backend[Any, Any, Any], virtual_cpus: VirtualCpus) -> DeviceChoice:
    """The devices for ``devices=``; ``virtual_cpus`` returns the options for that many virtual CPU devices."""
    if isinstance(devices, Device) or backend.is_device(devices):
        return DeviceChoice([devices])
    if isinstance(devices, (list, tuple)):
        return _of_names(devices, devices, backend, virtual_cpus)
    if not isinstance(devices, str | Integral) or isinstance(devices, bool):
        return DeviceChoice(devices)
    words = str(devices).strip()
    kind, colon, count = words.lower().partition(":")
    if kind in _ALL_GPUS and not colon:
        gpus = [f"gpu:{number}" for number in range(backend.num_gpus())]
        note = None if gpus or kind in ("all", "auto") else f"devices={devices!r}: {_NO_GPU}"
        return DeviceChoice(_standing_in(gpus, backend) or ["cpu"], note=note)
    if words.isdecimal() or isinstance(devices, Integral):
        return _as_many(devices, int(words), backend, virtual_cpus)
    if kind == "cpu" and "," not in count:
        if colon and (not count.isdecimal() or int(count) > _MOST_OF_CPU):
            raise BadDevice(f"devices={devices!r}: write cpu, or cpu:2 for two virtual CPU devices")
        return _of_cpu(int(count or 1) or 1, virtual_cpus)
    return _of_names(devices, [part.strip() for part in words.split(",")], backend, virtual_cpus)


def _of_names(
    written: Any, devices: Sequence[Any], backend: Backend[Any, Any, Any], virtual_cpus: VirtualCpus
) -> DeviceChoice:
    """The devices of a list; the first virtual devices are created where the process does not have them yet."""
    numbers = [isinstance(device, Integral) and not isinstance(device, bool) for device in devices]
    devices = [f"gpu:{device}" if is_number else device for device, is_number in zip(devices, numbers, strict=True)]
    for name in devices:
        if isinstance(name, str):
            _check_name(written, name, backend)
    first = [f"virtual:{number}" for number in range(len(devices))]
    if len(first) > backend.virtual_count() and len(first) > 1 and [str(device).lower() for device in devices] == first:
        return _of_cpu(len(first), virtual_cpus)
    return DeviceChoice(devices)


def _check_name(written: Any, name: str, backend: Backend[Any, Any, Any]) -> None:
    """Refuse what is not the name of a device, and a GPU that is not there."""
    try:
        device = Device.parse(name)
    except BadDevice as error:
        raise BadDevice(f"devices={written!r}: {name!r} is not the name of a device. {_WRITE}") from error
    if re.fullmatch(r"(gpu|cuda)(:\d+)?", name.lower()) and device.index >= backend.num_gpus():
        raise NoSuchDevice(
            f"devices={written!r}: there is no {name} here (manyhands devices shows what there is). Write cpu, or "
            "cpu:2 for two virtual CPU devices"
        )


def _as_many(devices: Any, count: int, backend: Backend[Any, Any, Any], virtual_cpus: VirtualCpus) -> DeviceChoice:
    if count < 1:
        raise BadDevice(f"devices={devices!r}: give a number of at least 1, 'gpu' for all GPUs, or 'cpu'")
    # Asked of the machine first: to look for GPUs starts JAX and TensorFlow, and they make no CPU devices after that.
    gpus = backend.num_gpus() if backend.virtual_count() or machine.may_have_gpus() else 0
    if not gpus:
        return _of_cpu(count, virtual_cpus)
    if count > gpus:
        raise BadDevice(
            f"devices={devices!r}: {count_of(gpus, 'GPU')} here. Give fewer, or 'cpu:{count}' for virtual CPU devices"
        )
    return DeviceChoice(_standing_in([f"gpu:{number}" for number in range(count)], backend))


def _standing_in(gpus: list[str], backend: Backend[Any, Any, Any]) -> list[Any]:
    """The devices themselves: virtual devices may stand in for GPUs under other names."""
    return [backend.gpu(number) for number in range(len(gpus))] if backend.virtual_count() else gpus


def _of_cpu(count: int, virtual_cpus: VirtualCpus) -> DeviceChoice:
    options = {"devices": ["cpu"]} if count == 1 else virtual_cpus(count)
    return DeviceChoice(options.pop("devices"), options)


def on_virtual_devices(backend: Backend[Any, Any, Any], count: int) -> dict[str, Any]:
    """The trainer's options where one process drives all devices: virtual ones, made before the framework starts."""
    if count == 1:
        return {"devices": ["cpu"]}
    if backend.virtual_count() < count:
        backend.virtual_devices(count)
    return {"devices": [f"virtual:{number}" for number in range(count)]}
