"""Streams and events of virtual devices, which compute immediately: everything that was issued is already done."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from manyhands.backends.torch import virtual

_numbers = itertools.count(1)


def index_of(device: Any) -> int:
    """The number of a device in any form that PyTorch takes (None: the current one); raises if it does not exist."""
    if isinstance(device, CurrentDevice):
        device = device.idx
    if device is None:
        return virtual.of_thread.current
    named = virtual.actual(device)
    if not virtual.is_virtual(named):
        raise ValueError(f"Expected a cuda device, but got: {named}")
    if not 0 <= named.index < virtual.count():
        raise RuntimeError(
            f"there is no device {virtual.shown_device(named)}: torch.cuda.device_count() is {virtual.count()}"
        )
    return int(named.index)


def set_device(device: Any) -> None:
    """``torch.cuda.set_device``; a negative number changes nothing, as there."""
    if not (isinstance(device, int) and device < 0):
        virtual.of_thread.current = index_of(device)


class CurrentDevice:
    """``with torch.cuda.device(1):``; None or a negative number changes nothing, as there."""

    def __init__(self, device: Any) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if unchanged else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = virtual.of_thread.current
        set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        set_device(self.prev_idx)


class DeviceOf(CurrentDevice):
    """``with torch.cuda.device_of(x):``, the device of a tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else -1)


class Event:
    """``torch.cuda.Event``: when it was recorded, by the host's clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, *unused: Any, **more: Any) -> None:
        self._timed = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end_event._recorded - self._recorded)


class Stream:
    """``torch.cuda.Stream``: a name for an order of work; all work of a virtual device is in program order."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **more: Any) -> None:
        self.device_index = index_of(device)
        self.priority = priority
        self.cuda_stream = self.stream_id = next(_numbers) if number is None else number
        self._outside: list[tuple[int, Stream]] = []

    @property
    def device(self) -> torch.device:
        return virtual.device(self.device_index)

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> Stream:
        self._outside.append((virtual.of_thread.current, current_stream(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        device, stream = self._outside.pop()
        set_stream(stream)
        virtual.of_thread.current = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device_index, self.stream_id) == (
            other.device_index,
            other.stream_id,
        )

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __repr__(self) -> str:
        return f"<virtual stream {self.stream_id} of {self.device}>"


def default_stream(device: Any = None) -> Stream:
    return Stream(index_of(device), number=0)


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return virtual.of_thread.streams.get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    """Make a stream the current one of its device, and its device the current one, as PyTorch does."""
    if stream is not None:
        virtual.of_thread.streams[stream.device_index] = stream
        virtual.of_thread.current = stream.device_index


def stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """``with torch.cuda.stream(s):``; None changes nothing."""
    return nullcontext() if stream is None else stream


def synchronize(device: Any = None) -> None:
    """Nothing to wait for; raises if the device does not exist."""
    index_of(device)


class NoGraphs:
    """CUDA graphs: a virtual device has no queue that could be captured."""

    def __init__(self, *unused: Any, **more: Any) -> None:
        raise RuntimeError(
            "virtual devices have no CUDA graphs: they compute at once, so there is nothing to capture. Call the "
            "function directly when torch.cuda.get_device_name() says 'virtual device'"
        )
