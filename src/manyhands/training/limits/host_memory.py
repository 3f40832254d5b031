"""Measures the memory that work takes on the host: a host that runs out of it kills the process without an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from manyhands import machine

_SHARE = 0.5  # of the free memory, where no bound is given
_PROC = Path("/proc/self")


def bound(processes: int) -> int:
    """The bytes that each of this many processes may take: a host without free memory kills other programs."""
    return int((machine.host_memory().free or 0) * _SHARE / processes)


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """How many bytes this process takes at most, within, more than before."""
    before, took = psutil.Process().memory_info().rss, [0]
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")  # Linux: forget the highest so far
    try:
        yield took
    finally:
        took[0] = max(0, _highest() - before)


class Trials:
    """Trials with larger and larger batches, each measured; one that is expected to exceed the bound is not made."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None  # samples at once, and the bytes that they took

    def fit(self, size: int, bound: int, trial: Callable[[], bool]) -> bool:
        """Whether the trial, with ``size`` samples at once, succeeds within the bound."""
        if self._last is None:
            trial()  # once without measuring: libraries take memory of their own
        elif self._last[1] * size > bound * self._last[0]:
            return False
        with peak() as took:
            succeeded = trial()
        self._last = size, took[0]
        return succeeded and took[0] <= bound


def _highest() -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
