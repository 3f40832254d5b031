"""The time of a step on N devices: what one device does, plus what several cost.

docs/forecast.md says where each term comes from. No constant is fitted to a table of training times;
``benchmarks/forecast.py`` compares with those.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from manyhands.errors import BadSettings
from manyhands.forecast.links import Link, all_reduce
from manyhands.forecast.profile import MemoryByPart, Profile

HIDDEN = 0.42  # GEMMs beside prioritised collectives: arXiv 2412.14335
JITTER = 0.08 / 5.4  # equal GPUs differ by 8% (arXiv 2208.11035); a box plot's ends are 5.4 deviations apart
DDP_COPIES = 3.5e-3 / 100e6  # seconds a byte: the middle of 2 to 5 ms per 100 MB
PAYS = 0.8  # of each device's time goes into training
TERMS = ("fixed cost", "communication", "latency", "contention", "stragglers", "copies", "host", "input")
_LARGEST_BATCH = 1 << 24
_LEAST_COMPUTING = 1e-3  # of a node's step
DEVICES = (1, 2, 4, 8, 16, 64, 1024)  # the default numbers of devices


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the model assumes if nothing was measured."""

    hidden: float = HIDDEN  # the fraction that is hidden of the time that perfect overlap would hide
    jitter: float = JITTER  # standard deviation of a device's step, as a fraction of its time
    copies: float = 0.0  # seconds a byte of gradients; manyhands' gradients are views of their buckets
    one_process: bool = False  # as in DataParallel: one host thread drives all devices
    input_rate: float = math.inf  # samples a second that the input pipeline of one machine prepares
    pays: float = PAYS

    def __post_init__(self) -> None:
        good = 0 <= self.hidden <= 1 and 0 <= self.jitter < 1 and self.copies >= 0 and 0 < self.pays <= 1
        if not (good and self.input_rate > 0):
            raise BadSettings(
                f"{self}: hidden and pays are parts of 1, jitter and copies not below 0, input_rate above 0"
            )


@dataclass(frozen=True, slots=True)
class Row:
    """The forecast for this many devices. ``batch`` is the global batch size."""

    devices: int
    batch: int
    seconds: float
    base: int  # devices that the speed-up is over: one, or a node
    base_seconds: float  # of the base for the same samples
    terms: dict[str, float]
    memory: MemoryByPart | None
    fits: bool | None
    pays: bool
    pays_from: int | None  # the smallest batch size at which this many devices pay; None: none does

    @property
    def shard(self) -> int:
        return -(-self.batch // self.devices)

    @property
    def speed_up(self) -> float:
        return self.base_seconds / self.seconds

    @property
    def efficiency(self) -> float:
        return self.speed_up * self.base / self.devices

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.batch / self.seconds

    @property
    def device_hours(self) -> float:
        """For a million samples."""
        return self.devices * 1e6 / self.rate / 3600

    @property
    def worst_term(self) -> str | None:
        """Which term eats most of the gain."""
        name = max(TERMS, key=lambda term: self.terms.get(term, 0.0))
        return name if self.devices > self.base and self.terms.get(name, 0.0) > 0 else None


def rows(
    profile: Profile,
    link: Link,
    devices: Sequence[int],
    batch: int | None = None,
    *,
    per_device: bool = False,
    assumptions: Assumptions = Assumptions(),  # noqa: B008 - frozen
) -> list[Row]:
    """One row for each number of devices.

    The batch is divided over the devices, as in the trainer; ``per_device``: each device, or each node where the
    profile is a node's, gets a whole batch (weak scaling).
    """
    batch = profile.batch_size if batch is None else batch
    base = profile.devices
    check_devices(devices, base)
    one = profile if base == 1 else _one_device(profile, link, assumptions)
    return [
        _row(one, link, count, batch * (count // base if per_device else 1), base, assumptions) for count in devices
    ]


def check_devices(devices: Sequence[int], base: int = 1) -> None:
    if not devices or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in devices):
        raise BadSettings(f"devices={list(devices)!r}: give whole numbers of at least 1, as [1, 2, 4, 8]")
    if any(n % base for n in devices):
        raise BadSettings(
            f"devices={list(devices)!r}: the profile is that of {base} devices, so give multiples of {base}"
        )


def _one_device(profile: Profile, link: Link, assumptions: Assumptions) -> Profile:
    """The profile of one device with which the forecast for the node is the node's own time."""
    count, given = profile.devices, profile.step(profile.batch_size).total
    parts = [replace(point, batch=-(-point.batch // count)) for point in profile.times]

    def scale(factor: float) -> Profile:
        times = tuple(part.times(factor) for part in parts)
        return replace(profile, devices=1, batch_size=-(-profile.batch_size // count), times=times)

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        terms = step_terms(scale(middle), link, count, profile.batch_size, assumptions)
        low, high = (middle, high) if sum(terms.values()) < given else (low, middle)
    if high < _LEAST_COMPUTING:
        raise BadSettings(
            f"a step of {count} devices that takes {given * 1e3:.3g} ms cannot be over link {link.name!r}: the sum of "
            "their gradients, or the input, takes longer alone"
        )
    return scale(high)


def _row(profile: Profile, link: Link, devices: int, batch: int, base: int, assumptions: Assumptions) -> Row:
    terms = step_terms(profile, link, devices, batch, assumptions)
    alone = sum(step_terms(profile, link, base, batch, assumptions).values())
    memory = profile.memory_of(-(-batch // devices), devices)
    shared = profile.devices_sharing(min(devices, link.per_node))
    fits = None if memory is None or profile.capacity is None else shared * memory.total <= profile.capacity
    seconds = sum(terms.values())
    pays = devices == base or alone / seconds * base / devices >= assumptions.pays
    smallest = 1 if devices == base else _pays_from(profile, link, devices, base, assumptions)
    return Row(devices, batch, seconds, base, alone, terms, memory, fits, pays, smallest)


def largest_shard(profile: Profile, link: Link, devices: int) -> int:
    """The most samples that fit into a device's memory; 0 if not even one fits."""
    shared = profile.devices_sharing(min(devices, link.per_node))
    capacity = math.inf if profile.capacity is None else profile.capacity / shared
    return _first(lambda shard: _peak(profile, shard, devices) > capacity, _LARGEST_BATCH) - 1


def step_terms(profile: Profile, link: Link, devices: int, batch: int, assumptions: Assumptions) -> dict[str, float]:
    """Seconds of a step by term; ``computing`` is what perfect scaling would take."""
    alone = profile.step(batch).total
    together = min(devices, link.per_node)
    prepared = -(-batch // devices) * together / assumptions.input_rate
    if devices == 1:
        return {"computing": alone, "input": max(0.0, prepared - alone)}
    step = profile.step(-(-batch // devices))
    slowdown = profile.devices_sharing(together)
    terms = {"computing": alone / devices, "fixed cost": step.total - alone / devices}
    terms["contention"] = step.total * (slowdown - 1)
    step = step.times(slowdown)
    exchange = _exchange(profile, link, devices, batch, step.backward, assumptions)
    terms["contention"] += exchange.pop("contention")
    terms |= exchange
    terms["stragglers"] = step.total * assumptions.jitter * _slowest(devices)
    terms["copies"] = assumptions.copies * profile.gradient_bytes
    terms["host"] = (devices - 1) * profile.fixed if assumptions.one_process else 0.0
    terms["input"] = max(0.0, prepared - sum(terms.values()))
    return terms


def _exchange(
    profile: Profile, link: Link, devices: int, batch: int, backward: float, assumptions: Assumptions
) -> dict[str, float]:
    """The seconds that summing gradients adds to a step whose backward pass takes ``backward`` seconds."""
    end = moving = latency = 0.0
    for bucket in profile.buckets:
        took = all_reduce(link, bucket.size, devices)
        end = max(end, bucket.ready * backward) + took.total
        moving, latency = moving + took.moving, latency + took.latency
    samples = profile.input_bytes * -(-batch // devices) / link.bandwidth(devices) if link.kind == "pcie" else 0.0
    left = max(0.0, end - backward)  # after the backward pass, if nothing slows down
    moving += samples
    total = moving + latency
    by_hops = left * latency / total if total else 0.0
    return {
        "communication": left - by_hops,
        "latency": by_hops,
        "contention": (1 - assumptions.hidden) * max(0.0, total - left),
    }


def _slowest(devices: int) -> float:
    """How many standard deviations the slowest of this many devices is above their mean (Blom, 1958)."""
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def _pays_from(profile: Profile, link: Link, devices: int, base: int, assumptions: Assumptions) -> int | None:
    """The smallest batch size at which this many devices pay; None: none does, or none that fits into memory."""

    def pays(shard: int) -> bool:
        alone, together = (
            sum(step_terms(profile, link, count, shard * devices, assumptions).values()) for count in (base, devices)
        )
        return alone / together * base / devices >= assumptions.pays

    most = _LARGEST_BATCH // devices
    if profile.capacity is not None and profile.memory:
        while most > 1 and _peak(profile, most, devices) > profile.capacity:
            most //= 2
    most = max(1, most)
    return _first(pays, most) * devices if pays(most) else None


def _first(is_true: Callable[[int], bool], last: int) -> int:
    """The first number from 1 on for which the condition is true and stays true; at most ``last``."""
    return 1 + bisect.bisect_left(range(1, last), True, key=is_true)


def _peak(profile: Profile, shard: int, devices: int) -> float:
    memory = profile.memory_of(shard, devices)
    return math.inf if memory is None else memory.total
