"""What the adapters of JAX, TensorFlow and MXNet share where a function is given to the framework's own runtime.

A :class:`Call` is one call's tensors and the signature by which a call like it is known again. A :class:`Traced` is
what the framework shows of a function (its tasks) and the way in which the framework itself runs it as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyhands.errors import CannotTrace
from manyhands.schedule.task import Kind, Task

# Modest figures of one core: only the proportions between tasks matter, the whole is scaled to what was measured.
_FLOPS, _BYTES, _ISSUE = 2e10, 8e9, 2e-6
_WATCHED = 1 << 16  # bytes of an array of NumPy's that are compared at every call
_SAME_OBJECT = "its content may change without being noticed"


@dataclass(frozen=True)
class Call:
    """One call: its arguments as they were given, the tensors in them, everything else, and its signature."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    tensors: list[Any]
    others: list[Any]
    signature: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass
class Traced:
    """What the framework shows of a function, and its own way to run it."""

    tasks: list[Task]
    way: str  # "jax.jit"
    compiled: Callable[[Call], Any] | None  # None: there is no such way for this function, and `notes` say why
    costs: str = "estimated from shapes"
    notes: list[str] = field(default_factory=list)
    writes: Sequence[Any] = ()  # variables that a call may write to
    # For each task its operation and shapes where several of a form could be one batched operation, else nothing.
    forms: Sequence[str] = ()
    # What the graph leaves out.
    missing: str | None = None


class Same:
    """An object that equals only itself; it is kept, so that no other can come to its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class Outputs:
    """How a function's result is put together: from what is computed, from arguments, from plain values."""

    unflatten: Callable[[list[Any]], Any]
    leaves: list[tuple[str, Any]]  # ("computed", None), ("argument", 2), ("value", 3.5)

    def put_together(self, computed: Sequence[Any], tensors: Sequence[Any]) -> Any:
        left = iter(computed)
        return self.unflatten(
            [
                next(left) if kind == "computed" else tensors[what] if kind == "argument" else what
                for kind, what in self.leaves
            ]
        )


def refuse_unknown(others: Sequence[Any], watched: Callable[[Any], bool]) -> None:
    """Everything that is no tensor takes part in a trace as it is: it must be known again by value or be watched."""
    for one in others:
        if isinstance(one, np.ndarray) or not watched(one):
            hint = ": make it a tensor of the framework" if isinstance(one, np.ndarray) else ""
            raise CannotTrace(f"an argument is a {type(one).__name__}, {_SAME_OBJECT}{hint}")


def content_of(array: np.ndarray[Any, Any]) -> list[tuple[str, Callable[[], Any]]]:
    """How an array of NumPy's from outside is watched: by its content, because it may be written to."""
    if not array.flags.writeable and array.base is None:
        return []
    if array.nbytes > _WATCHED:
        raise CannotTrace(f"it takes a NumPy array from outside that is too large to watch ({array.shape})")
    return [("content", array.tobytes)]


def told(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}"


def difference(one: Any, other: Any) -> tuple[bool, float]:
    """Whether two arrays are the same to the bit, and otherwise their relative difference; NaN equals NaN."""
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False, math.inf
    if a.dtype.kind in "OSUV" and a.dtype.names is None and a.dtype.kind != "V":
        return (True, 0.0) if bool((a == b).all()) else (False, math.inf)
    if a.tobytes() == b.tobytes():
        return True, 0.0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return False, math.inf
    a, b = np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf), np.nan_to_num(b, posinf=np.inf, neginf=-np.inf)
    if np.array_equal(a, b):
        return True, 0.0
    far = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-3))
    return False, far if math.isfinite(far) else math.inf


def compared(
    ones: Sequence[Any], others: Sequence[Any], array: Callable[[Any], Any], kind: Callable[[Any], Any]
) -> tuple[bool, float]:
    """Compare two lists of results: ``array`` reads a tensor (None: no tensor), ``kind`` is what else must be equal."""
    if len(ones) != len(others):
        return False, math.inf
    same, worst = True, 0.0
    for one, other in zip(ones, others, strict=True):
        mine, theirs = array(one), array(other)
        if mine is None or theirs is None:
            if mine is not theirs or type(one) is not type(other) or not (one is other or one == other):
                return False, math.inf
            continue
        if kind(one) != kind(other):
            return False, math.inf
        equal, far = difference(mine, theirs)
        same, worst = same and equal, max(worst, far)
    return same, worst


def estimate(operations: float, numbers: float, width: int = 4) -> float:
    """Seconds of a task by a roofline: its arithmetic, or the numbers that it reads and writes."""
    return _ISSUE + max(operations / _FLOPS, numbers * width / _BYTES)


def task(name: str, reads: set[int], writes: set[int], device: str, seconds: float, *, copies: bool = False) -> Task:
    kind: Kind = "copy" if copies else "compute"
    return Task(name, frozenset(reads), frozenset(writes), device, kind, seconds)
