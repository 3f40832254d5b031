"""A task: one call, with the memory it touches, the device it runs on, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# Copies to and from a GPU have separate lanes: a GPU has a copy engine for each direction.
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
    # The part of its device that it fills while it runs: two tasks of 0.5 run side by side at full speed.
    share: float = 1.0
    # Tasks with the same token keep the program's order: random numbers of a device, effects on the host.
    token: str | None = None
    # For pictures: the shape of its result, the path of the module that calls it (layers.0.attention), and whether its
    # result is only a view of existing memory.
    detail: str = field(default="", compare=False)
    module: str = field(default="", compare=False)
    is_view: bool = field(default=False, compare=False)
