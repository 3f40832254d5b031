"""The memory of the host that a piece of work takes: measured, because a host has no error for it but the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


def _highest() -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
