"""The step of one device as data: seconds by batch size, gradient buckets, memory by purpose.

A profile is measured (:mod:`manyhands.forecast.measured`), read from a file, or made from published figures: one
device's seconds and the size of the gradients. Between measured batch sizes, times and bytes are interpolated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from manyhands.errors import BadProfile, BadSettings, type_in_words
from manyhands.files import check_writable

SCHEMA = 1
# The same bucket sizes as in the trainer (training/torch/ranks/gradient_sum.py).
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
# A backward pass computes two products for each product of the forward pass: for the input and for the weights.
_FORWARD = 1 / 3
# The least host time of a step in eager mode, per parameter: ResNet-18 issues 454 operations for its 62 parameters, its
# optimizer about 4 for each, and issuing an operation takes 13 us (400 small products in 5.35 ms).
_HOST_SECONDS = (454 / 62 + 4) * 13.4e-6


# Peak memory
#
# A step makes the same operations for every batch size, and the memory in use after each of them is a linear function
# of the batch size. So the peak is the highest of these lines: for a small batch it may be in the optimizer, for a
# large one at the end of the forward pass. Only the few lines that are the highest for some batch size are kept.

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "batch")


@dataclass(frozen=True, slots=True)
class MemoryByPart:
    """Bytes in use on one device. ``activations``: all that has no other name, the workspace of operations, too."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    batch: float = 0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in MEMORY_PARTS))

    def as_dict(self) -> dict[str, int]:
        return {name: round(getattr(self, name)) for name in MEMORY_PARTS}


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The memory in use at one moment of a step: fixed bytes, and bytes per sample of a device's shard.

    ``several``: gradients are views of buckets, as with several ranks.
    """

    several: bool
    fixed: MemoryByPart
    per_sample: MemoryByPart

    def at(self, batch: float) -> MemoryByPart:
        fixed, slopes = self.fixed, self.per_sample
        return MemoryByPart(*(max(0.0, getattr(fixed, name) + batch * getattr(slopes, name)) for name in MEMORY_PARTS))


Steps = tuple[int, Sequence[MemoryByPart]]  # a batch size, and the memory in use after each operation of a step


def memory_lines(several: bool, small: Steps, large: Steps | None = None) -> list[MemoryLine]:
    """The lines whose highest is the peak. From a single step, memory is taken not to depend on the batch."""
    if large is None or large[0] == small[0]:
        return [MemoryLine(several, _peak(small[1]), MemoryByPart())]
    if len(small[1]) != len(large[1]):  # other operations: moments cannot be compared, so one line through both peaks
        return [_memory_line(several, small[0], _peak(small[1]), large[0], _peak(large[1]))]
    lines = [_memory_line(several, small[0], low, large[0], high) for low, high in zip(small[1], large[1], strict=True)]
    return [lines[number] for number in _highest([(line.per_sample.total, line.fixed.total) for line in lines])]


def _peak(moments: Sequence[MemoryByPart]) -> MemoryByPart:
    return max(moments, key=lambda memory: memory.total)


def _memory_line(several: bool, x0: int, first: MemoryByPart, x1: int, second: MemoryByPart) -> MemoryLine:
    slopes = MemoryByPart(*((getattr(second, name) - getattr(first, name)) / (x1 - x0) for name in MEMORY_PARTS))
    fixed = MemoryByPart(*(getattr(first, name) - x0 * getattr(slopes, name) for name in MEMORY_PARTS))
    return MemoryLine(several, fixed, slopes)


def _highest(lines: Sequence[tuple[float, float]]) -> list[int]:
    """The numbers of the lines (slope, value at zero) that are the highest at some batch size of 1 or more."""
    best: list[int] = []
    current = max(range(len(lines)), key=lambda n: (lines[n][0] + lines[n][1], lines[n][0]))
    while True:
        best.append(current)
        slope, intercept = lines[current]
        crossings = [
            ((intercept - other_intercept) / (other_slope - slope), -other_slope, number)
            for number, (other_slope, other_intercept) in enumerate(lines)
            if other_slope > slope
        ]
        if not crossings:
            return best
        current = min(crossings)[2]


# The step


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of the parts of a step on a shard of this many samples."""

    batch: int
    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer

    def times(self, factor: float) -> StepTime:
        return StepTime(self.batch, self.forward * factor, self.backward * factor, self.optimizer * factor)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together, and when they are ready, as a fraction of the backward pass."""

    size: int
    ready: float


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    device: str
    batch_size: int
    times: tuple[StepTime, ...]
    buckets: tuple[Bucket, ...]
    kind: str = "gpu"  # or "cpu"
    fixed: float = 0.0  # seconds of a step that no smaller batch saves, if only one batch size was measured
    input_bytes: float = 0.0  # of one sample
    memory: tuple[MemoryLine, ...] = ()
    capacity: int | None = None  # bytes of the device
    notes: tuple[str, ...] = field(default=())
    devices: int = 1  # that made the step together, each its part of the batch: a node

    @classmethod
    def of(
        cls,
        seconds: float,
        gradient_bytes: float,
        *,
        batch_size: int = 1,
        tensors: int = 0,
        devices: int = 1,
        name: str = "step",
        device: str = "device",
    ) -> Profile:
        """A profile from published figures, of one device or of a node with this many ``devices``.

        ``batch_size`` is that of all these devices together; ``tensors`` the number of parameter tensors, for the
        host's time.
        """
        if not seconds > 0 or not gradient_bytes > 0 or batch_size < 1:
            raise BadSettings(
                f"seconds={seconds!r}, gradient_bytes={gradient_bytes!r}, batch_size={batch_size!r}: a step takes time "
                "and has gradients and at least one sample"
            )
        if devices < 1 or batch_size % devices:
            raise BadSettings(
                f"batch_size={batch_size!r}, devices={devices!r}: each device has an equal part of the batch"
            )
        step = StepTime(batch_size, seconds * _FORWARD, seconds * (1 - _FORWARD), 0.0)
        fixed = min(seconds, tensors * _HOST_SECONDS)
        return cls(name, device, batch_size, (step,), spread_buckets(gradient_bytes), fixed=fixed, devices=devices)

    @property
    def gradient_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    def devices_sharing(self, devices: int) -> int:
        """How many of the devices of a node take turns and share one memory: those made of one CPU do."""
        return devices if self.kind == "cpu" else 1

    def step(self, batch: float) -> StepTime:
        """The parts of a step on one device while no other runs."""
        points = sorted(self.times, key=lambda point: point.batch)
        if len(points) == 1:
            only = points[0]
            fixed = min(self.fixed, only.total)
            factor = (fixed + (only.total - fixed) * batch / only.batch) / only.total
            return replace(only.times(factor), batch=round(batch))
        parts = {
            name: _line(_increasing_part([(point.batch, getattr(point, name)) for point in points]), batch)
            for name in ("forward", "backward", "optimizer")
        }
        return StepTime(round(batch), **parts)

    def memory_of(self, batch: float, devices: int) -> MemoryByPart | None:
        """The peak of a step on a shard of this many samples."""
        lines = [line.at(batch) for line in self.memory if line.several == (devices > 1)]
        return max(lines, key=lambda memory: memory.total, default=None)

    def save(self, path: str | Path) -> Path:
        """Write the profile as JSON, for a forecast elsewhere: ``manyhands forecast --profile FILE``."""
        check_writable(Path(path), BadProfile)
        Path(path).write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        values = read(Path(path), "profile")
        try:
            if "seconds" in values:  # published figures
                return cls.of(**{name: value for name, value in values.items() if name != "schema"})
            chosen: dict[str, Any] = {known.name: values[known.name] for known in fields(cls) if known.name in values}
            chosen["times"] = tuple(StepTime(**point) for point in chosen["times"])
            chosen["buckets"] = tuple(Bucket(**bucket) for bucket in chosen["buckets"])
            chosen["memory"] = tuple(
                MemoryLine(line["several"], MemoryByPart(**line["fixed"]), MemoryByPart(**line["per_sample"]))
                for line in chosen.get("memory", ())
            )
            profile = cls(**{**chosen, "notes": tuple(chosen.get("notes", ()))})
            profile._check()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise not_valid(str(path), "profile", f"{type(error).__name__}: {error}") from error
        return profile

    def _check(self) -> None:
        sizes = [bucket.size for bucket in self.buckets] + [point.batch for point in self.times]
        numbers = [self.batch_size, self.devices, *sizes]
        if not self.times or not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError("batch sizes, buckets, times and devices are above 0")
        if not all(point.total > 0 for point in self.times):
            raise ValueError("a step takes time")


def spread_buckets(total: float) -> tuple[Bucket, ...]:
    """Buckets of a model of which only the size is known: gradients become ready evenly during the backward pass."""
    buckets: list[Bucket] = []
    done = 0
    while done < round(total):
        size = min(round(total) - done, BUCKET if buckets else FIRST_BUCKET)
        done += size
        buckets.append(Bucket(size, done / total))
    return tuple(buckets)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x on the line through the two nearest points; never negative, outside never less for more."""
    if len(points) == 1:
        return points[0][1]
    place = next((n for n in range(1, len(points)) if x <= points[n][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    slope = (y1 - y0) / (x1 - x0)
    if x < x0:
        return max(0.0, y0 + max(0.0, slope) * (x - x0))
    return max(0.0, y1 + (slope if x <= x1 else max(0.0, slope)) * (x - x1))


def _increasing_part(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Times that grow with the batch, but never faster than the batch.

    Disturbances only add time: if a batch takes longer than a larger one, it gets the larger one's time. And a part of
    a batch takes at least its part of the time, or the forecast for N devices could be more than N times as fast.
    """
    grown = [(x, min(y for _, y in points[number:])) for number, (x, _) in enumerate(points)]
    for number in reversed(range(len(grown) - 1)):
        (x, y), (larger, seconds) = grown[number], grown[number + 1]
        grown[number] = x, max(y, seconds * x / larger)
    return grown


# Profiles and links as JSON files, validated on reading, because a file from outside may contain anything.


def read(path: Path, kind: str) -> dict[str, Any]:
    """Read the fields of a file; raises if the file has another version."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise BadProfile(f"the {kind} {str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise not_valid(str(path), kind, f"no JSON ({error})") from error
    if not isinstance(values, dict):
        raise not_valid(str(path), kind, f"{type_in_words(values)} instead of an object")
    schema = values.get("schema")
    if schema != SCHEMA:
        raise BadProfile(
            f"the {kind} {str(path)!r} has version {schema!r}, this manyhands reads version {SCHEMA}: measure again"
        )
    return values


def not_valid(where: str, kind: str, why: str) -> BadProfile:
    return BadProfile(f"{where!r} is not a {kind} of manyhands: {why}")
