"""The cost of each task: measured once per kind of operation, remembered on disk, or estimated.

The key of an operation consists of its target, the shapes, strides and dtypes of its tensors, and its device. The cost
measured for a key, on this hardware and with this version of the framework, is stored in a small file
(:mod:`manyhands.backends.cache`), so that a second run of a program plans without measuring. Costs that cannot be
measured are estimated.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from manyhands.amounts import count_of
from manyhands.backends.cache import CacheFile
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.run import costs as measuring
from manyhands.backends.torch.run.streams import Gpus
from manyhands.schedule.graph import Task

_FORMAT = 1
_BUDGET = 1.5  # seconds for measuring; after that, costs are estimated


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a task alone on its device, and the share of the device that it fills."""

    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Costed:
    """Tasks with their costs, and where the costs come from."""

    tasks: list[Task]
    measured: int = 0
    remembered: int = 0
    estimated: int = 0

    def summary(self) -> str:
        """How many costs were measured, remembered and estimated."""
        measured = count_of(self.measured, "kind of operation", "kinds of operations")
        return f"costs: {measured} measured, {self.remembered} from the cache, {self.estimated} estimated"


def costs(trace: Trace, device: Gpus | None, *, measure: bool = True) -> Costed:
    """The tasks of a trace with the cost of each on this machine. ``measure``: those that are not known yet."""
    tasks = measuring.tasks(trace, device)
    known = Remembered(measuring.hardware(device))
    costs_of: dict[str, Cost] = {}
    counts = dict.fromkeys(("measured", "remembered", "estimated"), 0)
    rates: tuple[float, float] | None = None
    end = time.monotonic() + (_BUDGET if measure else 0)
    result = []
    for number, (task, key) in enumerate(zip(tasks, measuring.cost_keys(trace), strict=True)):
        if key not in costs_of:
            cost, how = known.get(key), "remembered"
            if cost is None and time.monotonic() < end and (pair := measuring.measure(trace, number, device)):
                cost, how = Cost(*pair), "measured"
                known.add(key, cost)
            if cost is None:
                rates = rates or measuring.rates(device)
                cost, how = Cost(*measuring.estimate(trace, number, device, rates)), "estimated"
            costs_of[key] = cost
            counts[how] += 1
        cost = costs_of[key]
        result.append(replace(task, seconds=max(cost.seconds, 1e-9), share=cost.share))
    known.save()
    return Costed(result, **counts)


class Remembered:
    """The known costs for one kind of hardware and one version of a framework."""

    def __init__(self, hardware: str) -> None:
        self._file = CacheFile("costs", hardware, _FORMAT)
        self._known = {key: Cost(*map(float, value)) for key, value in self._file.read().items() if _is_cost(value)}
        self._new: dict[str, Cost] = {}

    @property
    def path(self) -> Path | None:
        return self._file.path

    def get(self, key: str) -> Cost | None:
        return self._known.get(key)

    def add(self, key: str, cost: Cost) -> None:
        self._known[key] = self._new[key] = cost

    def save(self) -> None:
        """Write new costs to the file; does nothing if that fails."""
        new = {key: [cost.seconds, cost.share] for key, cost in self._new.items()}
        if new and self._file.add(new):
            self._new = {}


def _is_cost(value: object) -> TypeGuard[list[float]]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(number) in (int, float) for number in value):
        return False
    seconds, share = value
    return math.isfinite(seconds) and 0 <= seconds < 1e6 and 0 <= share <= 1
