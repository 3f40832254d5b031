"""The step as a plan of ``parallel``: forward, backward, update and metrics, spread over lanes as a whole.

Side lanes (:mod:`.lanes.eager`) take operations in program order and move weight gradients aside. A plan traces the
step and schedules all of its operations: branches of the forward pass run in parallel, and an update begins when its
gradient is there. Planning takes seconds, in which the step is tried many times; what it changes is put back. There are
two kinds: a plan of ``parallel`` with PyTorch's kernels (:class:`PlanOfParallel`), and one with our kernels for
BatchNorm (:mod:`.traced_step`).

Plan and captured step compute the same bits (a plan that does not is not used), so either may make a step. They take
turns in the training, timed by the device, and the faster one goes on:

    plan | plan x 8, captured x 8 | three times | captured, until all times are there | the faster one

The host never waits for a time: it asks whether the device has it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from manyhands.backends.torch import planning
from manyhands.parallel.function import Parallel
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.forward import forward
from manyhands.training.torch.fast.progress import Progress
from manyhands.training.torch.step.eager import EagerStep

_TURNS, _STEPS = 3, 8
_Mark = Any  # an event of a GPU, or the seconds of a clock
Step = Callable[[], object]


def as_written(eager: EagerStep, data: Arrays, progress: Progress, window: torch.Tensor) -> Step:
    """The step of the next batch as written, without our kernels."""

    def step() -> None:
        eager.optimizer.zero_grad(set_to_none=True)
        loss, right = forward(eager, data, progress.order, progress.position + window)
        loss.backward()
        eager.clip_gradients()
        eager.optimizer.step()
        eager.metrics.add(loss, right, len(window), progress.step)
        progress.advance(len(window))

    return step


class WholeStep(Protocol):
    """A plan of the whole step. The first call plans, and makes a step; ``replay`` makes the later ones."""

    def __call__(self) -> object: ...

    def replay(self) -> object: ...

    def why_not(self) -> str | None:
        """After the first call: why it is not used, or None."""

    def explain(self) -> str: ...


class PlanOfParallel:
    """The step given to ``parallel``: its operations are as written, and equal to the bit."""

    def __init__(self, step: Step) -> None:
        self._fast: Parallel[[], object] = Parallel(step, planning, reuse_outputs=True)
        self._fast.has_guards = True  # the trainer's own (:mod:`.python_state`): Dynamo's would take seconds to make

    def __call__(self) -> None:
        self._fast()

    def replay(self) -> None:
        # Its guards are not asked again: a captured step has none either (:mod:`.python_state` watches for both).
        self._fast.planned.run([], (), {})

    def why_not(self) -> str | None:
        planned = self._fast.planned
        if planned.way.is_plain:
            return "; ".join(planned.notes) or "lanes are not faster"
        if planned.exactness is None or not planned.exactness.to_the_bit:
            return f"its results are not those of plain execution to the bit ({planned.how})"
        return None

    def explain(self) -> str:
        return self._fast.explain()


class PlannedStep:
    """Makes one step at every call: the faster of a plan and of a captured step, once it is known which that is."""

    def __init__(self, plan: WholeStep, captured: Step, progress: Progress) -> None:
        self._progress = progress
        self._plan: WholeStep | None = plan
        self._winner: Step | None = None
        self._seconds: tuple[float, float] | None = None  # of the plan, and of the captured step
        self._why: str | None = None  # there is no plan
        self._turns = self._race(plan, captured)

    def __call__(self) -> None:
        step = self._winner or next(self._turns)
        step()

    def _race(self, plan: WholeStep, captured: Step) -> Iterator[Step]:
        """The steps to make, one after the other, until it is known who wins."""
        yield functools.partial(self._first, plan, captured)
        planned = plan.replay
        times: dict[Step, list[tuple[_Mark, _Mark]]] = {planned: [], captured: []}
        for _ in range(_TURNS):
            for step, marks in times.items():
                yield step  # a warm-up
                yield from [functools.partial(self._timed, step, marks)] * _STEPS
        while not all(_is_over(end) for marks in times.values() for _, end in marks):
            yield captured
        by_plan, by_capture = (statistics.median(_seconds(*pair) for pair in marks) for marks in times.values())
        self._seconds = by_plan, by_capture
        yield self._win(planned if by_plan < by_capture else captured, uses_plan=by_plan < by_capture)

    def _timed(self, step: Step, times: list[tuple[_Mark, _Mark]]) -> None:
        begin = self._mark()
        step()
        times.append((begin, self._mark()))

    def _first(self, plan: WholeStep, captured: Step) -> None:
        """The first step plans. Where that fails and nothing was done yet, the captured one is made."""
        before = int(self._progress.position)
        try:
            plan()
        except Exception as error:
            if int(self._progress.position) != before:
                raise
            self._why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            captured()
        else:
            self._why = plan.why_not()
        if self._why is not None:
            self._win(captured, uses_plan=False)

    def _win(self, step: Step, *, uses_plan: bool) -> Step:
        """Make this step from now on, and free the memory of the other."""
        self._winner, self._turns = step, iter(())
        if not uses_plan:
            self._plan = None
        return step

    def _mark(self) -> _Mark:
        if self._progress.position.device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    @property
    def outcome(self) -> str:
        """What became of the plan, in a line."""
        if self._why is not None:
            return f"the whole step is not planned: {self._why}"[:300]
        if self._seconds is None:
            return "a plan of the whole step is being tried"
        plan, captured = (f"{seconds * 1e3:.3f} ms" for seconds in self._seconds)
        if self._plan is not None:
            return f"the whole step is planned: {plan}, with side lanes alone {captured}"
        return f"a plan of the whole step was tried and is not faster: {plan}, without it {captured}"

    def explain(self) -> list[str]:
        """What became of the plan, and the plan itself where it is used."""
        lines = self._plan.explain().splitlines() if self._plan is not None and self._seconds is not None else []
        return [f"  {self.outcome}", *(f"    {line}" for line in lines)]


def _is_over(mark: _Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds(begin: _Mark, end: _Mark) -> float:
    return end - begin if isinstance(end, float) else float(begin.elapsed_time(end)) / 1000
