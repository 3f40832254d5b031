"""The names of virtual devices, for the dispatcher and for Python; and each thread's current device and streams."""

from __future__ import annotations

import threading
from typing import Any

import torch

HOST = torch.device("cpu")
_count = 0
_as_cuda = False  # whether Python sees cuda:1 where the dispatcher sees cpu:1


class _ThreadState(threading.local):
    """The state of each thread."""

    def __init__(self) -> None:
        self.current = 0  # the device that "cuda" without a number means
        self.streams: dict[int, Any] = {}  # the current stream of each device, where it is not the default
        self.hooks: tuple[Any, ...] = ()


of_thread = _ThreadState()


def set_devices(number: int, *, as_cuda: bool) -> None:
    """There are ``number`` virtual devices from now on; Python sees them as GPUs where ``as_cuda``."""
    global _count, _as_cuda
    _count, _as_cuda = number, as_cuda


def count() -> int:
    return _count


def stands_in() -> bool:
    """Whether Python sees virtual devices as GPUs: ``cuda:1``."""
    return _as_cuda


def device(index: int) -> torch.device:
    """Virtual device number ``index``, as Python sees it."""
    return torch.device("cuda" if _as_cuda else "cpu", index)


def actual(device: torch.device | str | int) -> torch.device:
    """The device as the dispatcher knows it: ``cpu:1`` for ``cuda:1`` where virtual devices stand in for GPUs."""
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if not _as_cuda or named.type != "cuda":
        return named
    return torch.device("cpu", of_thread.current if named.index is None else named.index)


def shown_device(device: torch.device) -> torch.device:
    """The device as Python sees it: ``cuda:1`` for ``cpu:1`` where virtual devices stand in for GPUs."""
    return torch.device("cuda", device.index) if _as_cuda and is_virtual(device) else device


def is_virtual(device: torch.device) -> bool:
    """Whether a device, by the dispatcher's name, is virtual."""
    return device.type == "cpu" and device.index is not None


def check_exists(device: torch.device) -> None:
    if device.type == "cpu" and device.index is not None and device.index >= _count:
        raise RuntimeError(f"there is no virtual device {shown_device(device)}: this process has {_count} of them")
