"""What every task costs: measured once per kind of operation, remembered on disk, estimated where that cannot be.

An operation is known by its key: what is called, with tensors of which shapes, strides and types, on which device. What
was measured for a key on this hardware with this version of the framework stands in a small JSON file of the user's
cache folder, so a second run of a program plans without measuring. A file that is broken, foreign or of another format
is not read; one that cannot be written is not written: a cost is never worth an error.

Several processes may plan at once: each reads the file again before it writes, adds what it has found, and renames a
new file over the old one. Of two that do so at the same moment one loses its additions, and measures them another time.

The folder is ``$MANYHANDS_CACHE``, or ``$XDG_CACHE_HOME/manyhands``, or ``~/.cache/manyhands``; ``MANYHANDS_CACHE=off``
remembers nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.backends.planning import CallT, DevicesT, Planning, PlanT, TraceT
from manyhands.schedule.task import Task

_FORMAT = 1
_MOST = 20_000  # entries of a file; the oldest go first
_LARGEST = 8 << 20  # bytes of a file that is read
_BUDGET = 1.5  # seconds for measuring; what is not measured by then is estimated


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a task alone on its device, and how much of the device it fills meanwhile."""

    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Costed:
    """Tasks with their costs, and how these came about."""

    tasks: list[Task]
    measured: int = 0
    remembered: int = 0
    estimated: int = 0

    def told(self) -> str:
        return (
            f"costs: {self.measured} kinds of operations measured now, {self.remembered} remembered, "
            f"{self.estimated} estimated"
        )


def costs(backend: Planning[TraceT, CallT, DevicesT, PlanT], trace: TraceT, device: DevicesT | None) -> Costed:
    """The tasks of a trace with what each costs on this machine."""
    tasks = backend.tasks(trace, device)
    known = Remembered(backend.hardware(device))
    costs_of: dict[str, Cost] = {}
    counts = dict.fromkeys(("measured", "remembered", "estimated"), 0)
    rates: tuple[float, float] | None = None
    end = time.monotonic() + _BUDGET
    result = []
    for number, (task, key) in enumerate(zip(tasks, backend.cost_keys(trace), strict=True)):
        if key not in costs_of:
            cost, how = known.get(key), "remembered"
            if cost is None and time.monotonic() < end and (pair := backend.measured(trace, number, device)):
                cost, how = Cost(*pair), "measured"
                known.add(key, cost)
            if cost is None:
                rates = rates or backend.rates(device)
                cost, how = Cost(*backend.estimated(trace, number, device, rates)), "estimated"
            costs_of[key] = cost
            counts[how] += 1
        cost = costs_of[key]
        result.append(replace(task, seconds=max(cost.seconds, 1e-9), share=cost.share))
    known.save()
    return Costed(result, **counts)


class Remembered:
    """The costs that are known of one kind of hardware and one version of a framework."""

    def __init__(self, hardware: str) -> None:
        self.hardware = hardware
        folder = cache_folder()
        name = hashlib.sha256(hardware.encode()).hexdigest()[:24]
        self.path = None if folder is None else folder / "costs" / f"{name}.json"
        self._known = self._read()
        self._new: dict[str, Cost] = {}

    def get(self, key: str) -> Cost | None:
        return self._known.get(key)

    def add(self, key: str, cost: Cost) -> None:
        self._known[key] = self._new[key] = cost

    def save(self) -> None:
        """Write what is new; quietly nothing where that cannot be done."""
        if not self._new or self.path is None:
            return
        merged = self._read() | self._new
        kept = list(merged.items())[-_MOST:]
        text = json.dumps(
            {
                "format": _FORMAT,
                "hardware": self.hardware,
                "costs": {key: [cost.seconds, cost.share] for key, cost in kept},
            }
        )
        fresh = self.path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text)
            fresh.replace(self.path)
            self._new = {}
        except OSError:
            with suppress(OSError):
                fresh.unlink()

    def _read(self) -> dict[str, Cost]:
        """What the file holds, as far as it can be believed."""
        if self.path is None:
            return {}
        try:
            if self.path.stat().st_size > _LARGEST:
                return {}
            whole = json.loads(self.path.read_bytes())
            if whole["format"] != _FORMAT or whole["hardware"] != self.hardware:
                return {}
            pairs = whole["costs"].items()
            return {str(key): Cost(*map(float, value)) for key, value in pairs if _is_cost(value)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def _is_cost(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) in (int, float) for one in value):
        return False
    seconds, share = value
    return math.isfinite(seconds) and 0 <= seconds < 1e6 and 0 <= share <= 1


def cache_folder() -> Path | None:
    """Where costs are remembered; None where they are not."""
    given = os.environ.get("MANYHANDS_CACHE")
    if given is not None:
        return None if given.strip().lower() in ("", "off", "0", "no") else Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "manyhands"
    try:
        return Path.home() / ".cache" / "manyhands"
    except RuntimeError:  # a user without a home
        return None
