"""A task: one call, with the memory it touches, the device it runs on, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Copies to and from a GPU have lanes of their own: it has an engine for each direction.
Kind = Literal["compute", "copy in", "copy out", "copy", "host"]


@dataclass(frozen=True, slots=True)
class Task:
    """One call: what it touches, where it runs, what it costs."""

    name: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    device: str = "cpu"
    kind: Kind = "compute"
    seconds: float = 1e-6
    # How much of its device it fills while it runs: two tasks of a half can run at once at full speed.
    share: float = 1.0
    # Tasks with the same token keep the program's order: random numbers of a device, effects on the host.
    token: str | None = None
