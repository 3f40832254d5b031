"""What ``parallel`` needs of a framework whose own runtime runs a function as a whole: JAX, TensorFlow, MXNet.

A :class:`Call` is one call with its signature, by which a later call is recognised: tensors by their shape, dtype and
device, plain values by value, every other object by its identity. A :class:`Traced` is what the framework shows of the
function (its tasks) and the framework's way to run it. A :class:`Runtime` is what the ``planning`` module of such a
framework offers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands import tree
from manyhands.addresses import Same
from manyhands.errors import CannotTrace, type_in_words
from manyhands.schedule.task import Kind, Task

# Modest figures of one core: only the proportions between tasks matter, the whole is scaled to what was measured.
_FLOPS, _BYTES, _ISSUE = 2e10, 8e9, 2e-6
# How far results may be from plain execution's: a compiler may add in another order, and round less often.
_CLOSE, _CLOSE_HALF = 1e-5, 2e-2
# Plain values: equal ones are the same, and none can change.
PLAIN_VALUES: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), range, slice, type)
PLAIN_VALUES += (np.generic, np.dtype)

# The leaves, how to put them together, and their structure.
Flat = tuple[list[object], Callable[[list[object]], object], Hashable]
Run = Callable[[Sequence[object]], object]  # a call's result from its tensors


@dataclass(frozen=True)
class Call:
    """One call: its arguments, the tensors among them, everything else, and its signature."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    keywords: dict[str, object]
    tensors: list[object]
    others: list[object]
    signature: Hashable
    # The arguments and keywords with other tensors.
    rebuild: Callable[[Sequence[object]], tuple[tuple[object, ...], dict[str, object]]]

    def plainly(self) -> object:
        return self.function(*self.arguments, **self.keywords)


@dataclass
class Traced:
    """What the framework shows of a function, and its own way to run it."""

    tasks: list[Task]
    run: Run | None = None  # None: there is no such way for this function, and `notes` say why
    measured: bool = False  # the tasks' times; else they are estimated from shapes
    notes: list[str] = field(default_factory=list)
    writes: Sequence[object] = ()  # variables that a call may write to
    # For each task its operation and shapes where several of a form could be one batched operation, else nothing.
    forms: Sequence[str] = ()


# Shows what the framework makes of a call, from the objects outside that the call uses.
Tracer = Callable[[Sequence[object]], Traced]


class TaskHooks(Protocol):
    """What explicit tasks ask of a framework: see :class:`manyhands.tasks.hooks.Hooks`."""

    def memory_of(self, value: object, /) -> Hashable: ...
    def parts_of(self, value: object, /) -> Collection[object] | None: ...
    def version_of(self, value: object, /) -> object: ...
    def bound(self, function: Callable[..., object], /) -> Callable[..., object]: ...
    def exclusive(self, objects: list[object], words: Set[str], /) -> Collection[object]: ...


class Runtime(Protocol):
    name: str
    WAY: str  # what runs a function: "jax.jit"
    BATCH: str  # how several operations of a form become one
    LANES: str  # what the runtime does that the simulated lanes do not show
    PROFILER: str  # why there is no measured timeline, and what measures instead
    BY_VALUE: tuple[type, ...]
    tasks: TaskHooks

    def is_tracing(self, leaves: Sequence[object], /) -> bool:
        """Whether the framework is tracing right now: then the outer trace compiles everything."""

    def flatten(self, value: object, /) -> Flat: ...

    def form(self, leaf: object, /) -> Hashable | None:
        """What a tensor is known by in a signature; None: it is no tensor."""

    def modes(self) -> Hashable:
        """The framework's settings that a trace depends on."""

    def version_of(self, value: object, /) -> object:
        """What of an object outside is traced as a constant; None: it is read at every call, or cannot change."""

    def observe(self, call: Call, /) -> tuple[object, Tracer]:
        """Plain execution to its end: the result, and what traces the call, with what was seen on the way."""

    def wait(self, result: object, /) -> object: ...

    def variables(self, reached: Sequence[object], /) -> list[tuple[object, object]]:
        """The variables among these objects, each with the value that it has now."""

    def with_values(self, values: Sequence[tuple[object, object]], /) -> AbstractContextManager[None]:
        """Inside, variables have these values, and nothing is recorded for gradients; at the end all is as it was."""

    def numbers(self, leaf: object, /) -> NDArray[np.generic] | None:
        """A tensor as NumPy array; None: it is no tensor."""

    def kind(self, leaf: object, /) -> object:
        """What must be equal of two tensors besides their numbers: type, device."""

    def lanes(self, device: str, /) -> int:
        """How many operations run at once on a device."""


def flatten(value: object) -> Flat:
    """How a framework flattens a value unless it has trees of its own."""
    leaves, structure = tree.flatten(value)
    return leaves, structure.unflatten, structure


def call_of(
    runtime: Runtime, function: Callable[..., object], arguments: tuple[object, ...], keywords: dict[str, object]
) -> Call | None:
    """The call by which calls like it are known; None where the framework is tracing."""
    leaves, unflatten, structure = runtime.flatten((arguments, keywords))
    if runtime.is_tracing(leaves):
        return None
    forms = [runtime.form(leaf) for leaf in leaves]
    both = [*zip(leaves, forms, strict=True)]
    tensors = [leaf for leaf, form in both if form is not None]
    first: dict[int, int] = {}
    repeated = tuple(first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors))
    known = tuple(_known(leaf, runtime.BY_VALUE) if form is None else form for leaf, form in both)

    def rebuild(values: Sequence[object]) -> tuple[tuple[object, ...], dict[str, object]]:
        replacements = iter(values)
        return unflatten([leaf if form is None else next(replacements) for leaf, form in both])  # type: ignore[return-value]

    others = [leaf for leaf, form in both if form is None]
    signature = (structure, known, repeated, runtime.modes())
    return Call(function, arguments, keywords, tensors, others, signature, rebuild)


def _known(leaf: object, by_value: tuple[type, ...]) -> Hashable:
    if not isinstance(leaf, by_value):
        return Same(leaf)
    # NaN is itself, -0.0 is not 0.0; a slice cannot be hashed.
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex, slice, np.generic)) else leaf


class Argument(NamedTuple):
    """A result that is one of the tensors that the function was called with."""

    number: int


class Constant(NamedTuple):
    """A result that is the same plain value at every call."""

    value: object


@dataclass
class Outputs:
    """How a function's result is put together: from what is computed, from arguments, from plain values."""

    unflatten: Callable[[list[object]], object]
    leaves: list[Argument | Constant | None]  # None: the next of what is computed

    def rebuild(self, computed: Sequence[object], tensors: Sequence[object]) -> object:
        left = iter(computed)
        return self.unflatten(
            [
                next(left) if leaf is None else tensors[leaf.number] if isinstance(leaf, Argument) else leaf.value
                for leaf in self.leaves
            ]
        )


def split_result(
    flat: Flat,
    tensors: Sequence[object],
    computed: Callable[[object], object | None],
    constant: tuple[type, ...],
    others: Sequence[object] = (),
) -> tuple[list[object], Outputs]:
    """What a function computes of its result, and how the result is put together from that.

    ``computed``: what stands for a leaf that is computed, else None. ``constant``: what may be given back at every
    call as it is. ``others``: the arguments that are no tensors; a call with other ones has another signature.
    """
    leaves, unflatten, _ = flat
    places = {id(tensor): number for number, tensor in enumerate(tensors)}
    known = set(map(id, others))
    values: list[object] = []
    kinds: list[Argument | Constant | None] = []
    for leaf in leaves:
        if id(leaf) in places:
            kinds.append(Argument(places[id(leaf)]))
        elif (value := computed(leaf)) is not None:
            values.append(value)
            kinds.append(None)
        elif isinstance(leaf, constant) or id(leaf) in known:
            kinds.append(Constant(leaf))
        else:
            raise CannotTrace(f"a result is {type_in_words(leaf)}, and every call would return the same object")
    return values, Outputs(unflatten, kinds)


# Comparing


def difference(result: object, expected: object) -> tuple[bool, float]:
    """Whether two arrays are the same to the bit, and otherwise their relative difference; NaN equals NaN.

    Whole numbers, texts and truth values are equal, or infinitely far apart.
    """
    a, b = np.asarray(result), np.asarray(expected)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False, math.inf
    if a.tobytes() == b.tobytes() or (a.dtype.kind in "OSU" and bool((a == b).all())):
        return True, 0.0
    if a.dtype.kind in "OSUiub":
        return False, math.inf
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    if equal.all():
        return True, 0.0  # -0.0, or another NaN
    apart = np.where(equal, 0, a - b)
    far = float(np.linalg.norm(apart) / max(float(np.linalg.norm(np.where(np.isfinite(b), b, 0))), 1e-3))
    return False, far if math.isfinite(far) else math.inf


class Comparison(NamedTuple):
    same: bool  # to the bit
    difference: float  # the largest, relative to the expected results
    close: bool  # as near as another kernel, or a compiler that rounds less often, may be


def compared(runtime: Runtime, results: Sequence[object], expected: Sequence[object]) -> Comparison:
    same, worst, close = True, 0.0, True
    for result, plain in zip(results, expected, strict=False):
        numbers, plain_numbers = runtime.numbers(result), runtime.numbers(plain)
        if numbers is None or plain_numbers is None:
            if (
                numbers is not plain_numbers
                or type(result) is not type(plain)
                or not (result is plain or result == plain)
            ):
                return _UNLIKE
        elif runtime.kind(result) != runtime.kind(plain):
            return _UNLIKE
        else:
            equal, far = difference(numbers, plain_numbers)
            tolerance = _CLOSE_HALF if numbers.dtype.itemsize == 2 else _CLOSE
            same, worst, close = same and equal, max(worst, far), close and far <= tolerance
    return Comparison(same, worst, close) if len(results) == len(expected) else _UNLIKE


_UNLIKE = Comparison(False, math.inf, False)


# Tasks


def estimate(operations: float, numbers: float, width: int = 4) -> float:
    """Seconds of a task by a roofline: its arithmetic, or the numbers that it reads and writes."""
    return _ISSUE + max(operations / _FLOPS, numbers * width / _BYTES)


def task(name: str, reads: set[int], writes: set[int], device: str, seconds: float, *, copies: bool = False) -> Task:
    kind: Kind = "copy" if copies else "compute"
    return Task(name, frozenset(reads), frozenset(writes), device, kind, seconds)
