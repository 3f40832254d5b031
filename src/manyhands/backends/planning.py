"""The seam between the planner and a framework: what ``parallel(fn)`` asks of a framework whose functions it plans.

That is PyTorch (:mod:`manyhands.backends.torch.planning`); the others schedule functions themselves. The planner never
looks into a trace, a call, a plan or a device of the framework: it only passes them on. They are the four type
variables here; small protocols say what may be asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from manyhands.backends.exactness import Verdict
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.task import Task

# What a user's function takes and gives can be anything.
Value = object
# A tensor of the framework. The planner only hands it back to the framework: no protocol could say more of it, and a
# type variable would have to go through every class of the planner.
Tensor = Any
# How a call is run: its tensors, and the arguments as they were given.
Run = Callable[[Sequence[Tensor], tuple[Value, ...], dict[str, Value]], Value]


class Call(Protocol):
    """One call of a function."""

    @property
    def signature(self) -> tuple[Value, ...]:
        """What has to be the same for another call to be run in the same way."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def shares_memory(self) -> bool:
        """Whether two of the tensors do."""

    @property
    def run_arguments(self) -> tuple[Sequence[Tensor], tuple[Value, ...], dict[str, Value]]:
        """What a run takes."""


class Trace(Protocol):
    """A captured function."""

    @property
    def tasks(self) -> Sequence[Task]: ...

    @property
    def passes(self) -> Sequence[str]:
        """What passes have done to it, in words."""

    @property
    def holds(self) -> Callable[[], bool]:
        """Whether all that it depends on outside its arguments is as it was."""

    @property
    def changed(self) -> Callable[[], str | None]:
        """What of that is not, in words."""

    @property
    def close(self) -> float:
        """How far results may be from plain execution's, where another kernel adds in another order."""

    @property
    def as_written(self) -> object | None:
        """The trace without compiled regions, where this one has some."""

    @property
    def compiled_regions(self) -> int:
        """The number of tasks that are compiled from several operations."""


class Replay(Protocol):
    """A plan that can be run."""

    @property
    def concurrent(self) -> bool:
        """Whether several threads may run it at once."""

    def replay(self, inputs: Sequence[Tensor]) -> list[Value]:
        """Run it; the results as a flat list."""


TraceT = TypeVar("TraceT", bound=Trace)
CallT = TypeVar("CallT", bound=Call)
DevicesT = TypeVar("DevicesT")
PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class Break:
    """A line at which a function cannot be captured further: Python does it, and a new piece begins behind it."""

    file: str
    line: int
    function: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}: {self.code}  ({self.reason})"


@dataclass(frozen=True, eq=False)
class Piece:
    """What is captured between two breaks: a graph, and a second one where gradients flow back through it."""

    place: str  # the user's lines that it stands for: "train.py:10-13"


@dataclass(frozen=True)
class GraphPlan:
    """How a captured graph is run for arguments like those that it was planned with."""

    run: Run
    in_graph: bool  # a CUDA graph: results lie in its memory if they may be overwritten
    is_final: bool  # False: to be planned again at the next call
    # After how many calls it pays to look for a better plan, and what does so; None: there is nothing left to try.
    later: tuple[int, Planner] | None = None


# Plans a captured graph for arguments; None: it runs without a plan.
Planner = Callable[[tuple[Value, ...]], GraphPlan | None]
# Makes a planner: of a piece's graph, whether it is the backward one, and whether a call may overwrite its results.
MakePlanner = Callable[[Piece, Callable[..., Value], bool, bool], Planner]


class InPieces(Protocol):
    """A function that is captured where that is possible, and run by Python where it is not."""

    @property
    def breaks(self) -> Sequence[Break]: ...

    @property
    def notes(self) -> Sequence[str]:
        """What went wrong while it was captured: there it is run plainly."""

    @property
    def captured(self) -> int:
        """How often something was captured so far: grows where a call is not like those before."""

    def call(self, arguments: tuple[Value, ...], keywords: dict[str, Value]) -> Value:
        """What the function gives."""

    def last_pieces(self) -> Sequence[Piece]:
        """The pieces that this thread's last call consisted of, in their order."""


@dataclass
class Times:
    """Seconds of one call; a backward pass through its results may come later, or never."""

    forward: float = 0.0
    backward: float | None = None


class Planning(Protocol[TraceT, CallT, DevicesT, PlanT]):
    """All that the planner asks. Devices are None where there is only the CPU."""

    # Capture

    def call(self, arguments: tuple[Value, ...], keywords: dict[str, Value]) -> CallT:
        """The call with these arguments."""

    def mode(self) -> object:
        """What of the framework's modes may make another plan of a call; asked before every call."""

    def recogniser(self, call: CallT) -> Callable[..., list[Tensor] | None] | None:
        """What tells quickly whether another call is like this one, and gives its tensors; None where none can."""

    def trace(self, function: Callable[..., Value], call: CallT, *, to_compile: bool = False) -> TraceT:
        """The function as tasks; :class:`~manyhands.errors.CannotTrace` says why there are none.

        ``to_compile``: in small operations, which a compiler can fuse, also where plain execution has a large one.
        """

    def unsplit(self, trace: TraceT) -> TraceT | None:
        """The trace with operations whole that were taken apart for lanes; None where none were."""

    def fuse(self, trace: TraceT) -> TraceT:
        """The trace with runs of small operations compiled; :class:`~manyhands.errors.CannotFuse` says why not."""

    def fuse_whole(self, trace: TraceT) -> TraceT:
        """The trace compiled as one task; :class:`~manyhands.errors.CannotFuse` says why not."""

    def guards(
        self,
        function: Callable[..., Value],
        arguments: tuple[Value, ...],
        keywords: dict[str, Value],
        trace: TraceT,
    ) -> Callable[[tuple[Value, ...], dict[str, Value]], bool] | None:
        """Tells of a call whether all that the code looks at is as it was, beside what the trace's own guards watch.

        None: they have to do.

        :class:`~manyhands.errors.CannotGuard` says why there are no others.
        """

    def in_pieces(self, function: Callable[..., Value], make: MakePlanner) -> InPieces:
        """The function, captured in pieces when it is called."""

    def has_pieces(self) -> bool:
        """Whether functions can be captured in pieces, as things are now."""

    def timed_call(self, call: Callable[[], Value]) -> tuple[Value, Times]:
        """What a call gives, and what it takes, the devices' work included; so for a backward pass after it."""

    # Facts

    def device_of(self, call: CallT, trace: TraceT) -> DevicesT | None: ...

    def tasks(self, trace: TraceT, device: DevicesT | None) -> list[Task]:
        """Its tasks as they are run there."""

    def footprint(self, trace: TraceT) -> tuple[dict[int, int], frozenset[int], frozenset[int]]:
        """The bytes of each memory, the memories of the inputs, and those of the results."""

    def copied_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Of arguments that a captured graph has to copy."""

    def device_memory(self, devices: DevicesT | None) -> int:
        """Bytes in all."""

    def batch_hint(self, trace: TraceT, number: int) -> str | None:
        """What a task could be batched to, if several like it stand side by side."""

    def why_no_graph(self, trace: TraceT) -> str | None: ...

    def copies_or_computes_on_host(self, trace: TraceT) -> bool: ...

    # Costs

    def hardware(self, device: DevicesT | None) -> str:
        """What costs depend on: processors, versions, settings."""

    def cost_keys(self, trace: TraceT) -> list[str]:
        """For each task a key that tasks of the same cost share."""

    def measured(self, trace: TraceT, number: int, device: DevicesT | None) -> tuple[float, float] | None:
        """Seconds of a task and the share of the device that it fills."""

    def rates(self, device: DevicesT | None) -> tuple[float, float]:
        """Operations and bytes a second."""

    def estimated(
        self, trace: TraceT, number: int, device: DevicesT | None, known: tuple[float, float]
    ) -> tuple[float, float]:
        """As ``measured``, from the rates."""

    # Runs

    def plan_of(self, schedule: Schedule) -> PlanT:
        """What the framework needs of a schedule."""

    def release_points(self, trace: TraceT, plan: PlanT) -> Mapping[int, int]:
        """For each memory the task after which a run frees it."""

    def threads(self) -> int: ...

    def thread_run(self, trace: TraceT, plan: PlanT, count: int) -> Replay: ...

    def synchronous_run(self, trace: TraceT, plan: PlanT) -> Replay: ...

    def with_threads(self, run: Run, count: int) -> Run: ...

    def graph_run(
        self, trace: TraceT, plan: PlanT, tensors: Sequence[Tensor], devices: DevicesT, *, reuse_outputs: bool = ...
    ) -> Replay: ...

    def stream_run(
        self, trace: TraceT, plan: PlanT, tensors: Sequence[Tensor], devices: DevicesT, *, reuse_outputs: bool = ...
    ) -> Replay: ...

    def together(self, trace: TraceT) -> Callable[[Sequence[Value]], Value]:
        """What puts the flat results together to what the function gives."""

    def mixing(self, trace: TraceT) -> Callable[[Sequence[Tensor]], bool] | None:
        """Whether arguments share memory with tensors from outside in a way that a schedule knows nothing of."""

    def timed(
        self, trace: TraceT, plan: PlanT, devices: DevicesT | None, threads: int
    ) -> Sequence[tuple[float, float]]:
        """When each task of a run began and ended."""

    def seconds(
        self, run: Callable[[], object], device: DevicesT | None, put_back: Callable[[], None], repeats: int = ...
    ) -> float: ...

    # Trials

    def untouched(self, trace: TraceT, tensors: Sequence[Tensor]) -> AbstractContextManager[Callable[[], None]]:
        """Trying a function leaves nothing behind; gives what puts back what was written so far."""

    def with_varied_numbers(self, call: CallT) -> CallT:
        """The call with varied numbers in place of arguments whose numbers are all the same: they compare nothing."""

    def expected(self, trace: TraceT, call: CallT, plainly: Run) -> list[Value]:
        """What plain execution gives and leaves behind."""

    def observed(self, trace: TraceT, call: CallT, run: Replay) -> list[Value]:
        """The same of a run."""

    def exact(self, trace: TraceT, call: CallT) -> list[Value]:
        """The same in float64."""

    def verdict(
        self, trace: TraceT, call: CallT, candidate: Sequence[Value], plain: Sequence[Value], exactly: Sequence[Value]
    ) -> Verdict: ...

    def equal(self, results: Sequence[Value], expected: Sequence[Value]) -> tuple[bool, float]:
        """Whether results are the same to the bit, and their largest relative difference."""

    def overlapping(self, values: Sequence[Value]) -> set[tuple[int, int]]:
        """Which results lie in the same bytes."""

    # Failures and random numbers

    def is_out_of_memory(self, error: BaseException) -> bool: ...

    def can_be_repeated(self, trace: TraceT, error: BaseException) -> bool: ...

    def runs_ahead(self, trace: TraceT) -> Callable[[], bool] | None:
        """What tells whether a run can be started before it is known whether its results are wanted.

        None where it never can: it writes to something, draws random numbers or checks values.
        """

    def random_devices(self, trace: TraceT) -> list[str]: ...

    def random_state(self, devices: Sequence[str]) -> list[Tensor]: ...

    def set_random_state(self, devices: Sequence[str], states: Sequence[Tensor]) -> None: ...


# Of one framework; which one, the planner does not know, and Python has no type for that.
AnyPlanning = Planning[Any, Any, Any, Any]
