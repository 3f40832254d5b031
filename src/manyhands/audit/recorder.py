"""What a program did: its waits and, between them, its work, cut into steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.audit.critical_path import HostWait, Work
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import Kind
from manyhands.audit.sites import Line, Site
from manyhands.audit.speeds import DeviceSpeeds, h200
from manyhands.audit.watch import WaitEvent

_MOST_ENTRIES = 500_000
# Kinds whose time is the host's own: the device may go on meanwhile.
_HOST_ONLY = {Kind.LOADER, Kind.COLLECTIVE, Kind.HOST_OPERATION}
_TINY_LAUNCHES = 32  # of one line in one run of its function, per step


@dataclass(frozen=True)
class Entry:
    """One piece of the record: work before a wait, and the wait."""

    step: int
    work: Work
    key: Stall | None
    wait: HostWait | None  # the number of its finding is still unknown (-1)
    seconds: float = 0.0
    times: int = 1


class Recorder:
    """A sink for a whole program."""

    def __init__(self, *, speeds: DeviceSpeeds | None = None, on_step: Callable[[int], None] | None = None) -> None:
        self.speeds = speeds  # of the device that is stood in for; None: a real one is there
        self.steps = 0
        self.step_times: list[float] = [time.perf_counter()]
        self.entries: list[Entry] = []
        self.others: list[tuple[int, Stall, float]] = []  # waits of other threads than the loop's
        self.loaders: dict[Stall, list[float]] = {}  # where the rest is predicted: the clock's seconds of each batch
        self.used_device = False
        self.frameworks: set[str] = set()
        self.forks = 0
        self.remarks: list[str] = []  # of a framework's hooks, in words
        self.launched = False  # whether operations on what stands in for a device were seen
        self.incomplete = False  # more entries than are kept
        self.busy_seconds: float | None = None  # of the device, in one step, where that was measured
        self.kernel_seconds: float | None = None  # the same without copies from and to pageable memory
        self._on_step = on_step
        self._thread = threading.get_ident()  # that of the steps; until the first one, the program's main thread
        self._last = time.perf_counter()
        self._host = self._device = 0.0  # predicted work since the last entry
        self._seen_in_step: set[object] = set()
        self._loop: object | None = None
        self._launches: dict[tuple[int, Line], int] = {}
        self._lock = threading.RLock()

    # The sink

    def before(self, stall: Stall) -> None:
        self.used_device = True

    def after(self, event: WaitEvent) -> None:
        with self._lock:
            if self.speeds is not None and event.stall.kind is Kind.LOADER:
                self.loaders.setdefault(event.stall, []).append(event.seconds)
                return
            if threading.get_ident() != self._thread:
                self.others.append((self.steps, event.stall, self._seconds(event)))
                return
            self._add(event)
            self._last = time.perf_counter() if self.speeds is None else self._last

    def _add(self, event: WaitEvent) -> None:
        if len(self.entries) >= _MOST_ENTRIES:
            self.incomplete = True
            return
        if self.speeds is None:
            work = Work(max(0.0, event.begin - self._last))
            wait = measured_wait(event)
        else:
            work, wait = self._take(), predicted_wait(event, self.speeds)
        self.entries.append(Entry(self.steps, work, event.stall, wait, event.seconds))

    def _seconds(self, event: WaitEvent) -> float:
        if self.speeds is None:
            return event.seconds
        wait = predicted_wait(event, self.speeds)
        return wait.host + wait.device

    def _take(self) -> Work:
        work = Work(self._host, self._device)
        self._host = self._device = 0.0
        return work

    # What hooks report besides waits

    def launch(self, seconds: float, line: tuple[int, Line] | None = None, *, kernel: bool = True) -> None:
        """An operation was launched on what stands in for a device, by this line in this run of its function."""
        speeds = self.speeds
        self.used_device = self.launched = True
        if speeds is None or threading.get_ident() != self._thread:
            return
        with self._lock:
            self._host += speeds.launch if kernel else speeds.launch / 4
            self._device += max(seconds, speeds.kernel) if kernel else 0.0
            if line is not None and kernel and seconds <= 2 * speeds.kernel:
                self._launches[line] = self._launches.get(line, 0) + 1

    def step(self, who: object, *, loop: bool = False) -> None:
        """An optimizer has made its step. With several optimizers, a step ends when the first comes round again.

        If a ``loop`` (the trainer's) reports its steps, only these count.
        """
        with self._lock:
            if loop:
                self._loop = who
            elif self._loop is not None:
                return
            self._thread = threading.get_ident() if self.steps == 0 else self._thread
            if self._thread != threading.get_ident():
                return
            if self._seen_in_step and who not in self._seen_in_step and not loop:
                self._seen_in_step.add(who)
                return
            self._seen_in_step = {who}
            self._end_step()
        if self._on_step is not None:
            self._on_step(self.steps)
            with self._lock:  # its time (stopping a profiler takes a while) is not part of the next step
                self._last = self.step_times[-1] = time.perf_counter()

    def _end_step(self) -> None:
        now = time.perf_counter()
        self._note_launches()
        work = Work(max(0.0, now - self._last)) if self.speeds is None else self._take()
        if len(self.entries) < _MOST_ENTRIES:
            self.entries.append(Entry(self.steps, work, None, None))
        self._last = now
        self.steps += 1
        self.step_times.append(now)

    def _note_launches(self) -> None:
        """Lines that launched many tiny operations, one by one."""
        for (_, line), count in self._launches.items():
            if count >= _TINY_LAUNCHES and self.speeds is not None:
                # Its host time is in the work since the last wait: moved here, so that it can be left out.
                wait = HostWait(-1, host=min(self._host, count * self.speeds.launch), drains=False)
                self._host -= wait.host
                key = Stall(Kind.LAUNCHES, "operations", Site(line))
                self.entries.append(Entry(self.steps, self._take(), key, wait, wait.host, count))
        self._launches.clear()


def measured_wait(event: WaitEvent) -> HostWait:
    """Which part of a measured wait is the call itself; the rest is waiting for work that was launched before.

    The call cannot be measured separately: its time is that of an H200, at most the measured one.
    """
    kind = event.stall.kind
    if kind in _HOST_ONLY:
        return HostWait(-1, host=event.seconds, drains=False)
    host, copy = _copy_seconds(kind, event.nbytes, h200()) or (0.0, 0.0)
    call = 0.0 if kind is Kind.SYNCHRONIZE else min(h200().launch + host, event.seconds)
    copy = min(copy, call)
    return HostWait(-1, device=copy, after=call - copy)


def predicted_wait(event: WaitEvent, speeds: DeviceSpeeds) -> HostWait:
    """What a wait costs on the device that is stood in for: by its speeds, never by this machine's clock."""
    kind = event.stall.kind
    if kind in _HOST_ONLY:
        return HostWait(-1, host=speeds.launch, drains=False)
    if kind is Kind.SYNCHRONIZE:
        return HostWait(-1)
    host, copy = _copy_seconds(kind, event.nbytes, speeds) or (0.0, speeds.kernel)
    if kind in (Kind.TO_HOST, Kind.BLOCKING):  # the host only waits while the device copies
        host = max(0.0, host - copy)
    return HostWait(-1, host=speeds.launch + host, device=copy)


def _copy_seconds(kind: Kind, size: int, speeds: DeviceSpeeds) -> tuple[float, float] | None:
    """How long a copy occupies the host, which copies pageable memory, and the device; None: it is not a copy."""
    if kind is Kind.TO_HOST:
        return size / speeds.to_host, size / speeds.to_host_pinned
    if kind in (Kind.TO_DEVICE, Kind.IMPLICIT, Kind.DATA):
        return size / speeds.to_device, size / speeds.to_device_pinned
    if kind is Kind.BLOCKING:
        return size / speeds.to_device_pinned, size / speeds.to_device_pinned
    return None
