"""The step as a plan of ``parallel``: one schedule on several lanes for forward, backward, update and metrics.

Side lanes (:mod:`.lanes.eager`) keep the program order and only move weight gradients off the main lane. A plan traces
the step and schedules all of its operations: branches of the forward pass run in parallel, and an update begins as soon
as its gradient is ready. Planning takes seconds, runs the step many times, and restores all that the step changes. A
plan uses PyTorch's kernels, so a step that has ours for normalisation is not planned.

A plan must give the captured step's results, equal to the bit, or it is not used. So either can run a training step.
They alternate during training, the device times them, and the faster one runs from then on:

    plan | plan x 8, captured x 8 | three times | captured, until all times are known | the faster one

The host never waits for a time: it polls the device's events.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from manyhands.backends.torch import planning
from manyhands.parallel.function import Parallel
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.forward import forward
from manyhands.training.torch.fast.position import Position
from manyhands.training.torch.step.eager import EagerStep

_TURNS, _STEPS = 3, 8
_Mark = Any  # an event of a GPU, or the seconds of a clock
Step = Callable[[], object]


def as_written(eager: EagerStep, data: Arrays, position: Position, window: torch.Tensor) -> Step:
    """The training step for the next batch in plain PyTorch, without our kernels."""

    def step() -> None:
        eager.optimizer.zero_grad(set_to_none=True)
        loss, correct = forward(eager, data, position.order, position.sample + window)
        loss.backward()
        eager.clip_gradients()
        eager.update([loss.detach()], position.step)
        eager.metrics.add(loss, correct, len(window), position.step)
        position.advance(len(window))

    return step


class ParallelPlan:
    """A plan that ``parallel`` makes of the step: the same operations, with results equal to the bit.

    The first call plans and runs one step; ``replay`` runs each later step.
    """

    def __init__(self, step: Step) -> None:
        self._fast: Parallel[[], object] = Parallel(step, planning, reuse_outputs=True)
        self._fast.has_guards = True  # the trainer's (:mod:`.python_state`): Dynamo's would take seconds to build

    def __call__(self) -> None:
        self._fast()

    def replay(self) -> None:
        # Without guards, as in a captured step: :mod:`.python_state` watches for both.
        self._fast.planned.run([], (), {})

    def why_not(self) -> str | None:
        """After the first call: why the plan is not used, or None."""
        planned = self._fast.planned
        if planned.way.is_plain:
            return "; ".join(planned.notes) or "lanes are not faster"
        if planned.exactness is None or not planned.exactness.to_the_bit:
            return f"its results are not those of plain execution to the bit ({planned.how})"
        return None

    def explain(self) -> str:
        return self._fast.explain()


class PlannedStep:
    """Runs one step per call: by a plan and by a captured step in turns, then by the faster of the two."""

    def __init__(self, plan: ParallelPlan, captured: Step, position: Position) -> None:
        self._position = position
        self._plan: ParallelPlan | None = plan
        self._winner: Step | None = None
        self._seconds: tuple[float, float] | None = None  # per step: the plan's, the captured step's
        self._why: str | None = None  # why there is no plan
        self._turns = self._race(plan, captured)

    def __call__(self) -> None:
        step = self._winner or next(self._turns)
        step()

    def _race(self, plan: ParallelPlan, captured: Step) -> Iterator[Step]:
        """The steps to run, one after the other, until the faster way is known."""
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

    def _first(self, plan: ParallelPlan, captured: Step) -> None:
        """Plan in the first step. If planning fails before the step changed anything, run the captured step instead."""
        before = int(self._position.sample)
        try:
            plan()
        except Exception as error:
            if int(self._position.sample) != before:
                raise
            self._why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            captured()
        else:
            self._why = plan.why_not()
        if self._why is not None:
            self._win(captured, uses_plan=False)

    def _win(self, step: Step, *, uses_plan: bool) -> Step:
        """Run only this step from now on, and free the memory of the other."""
        self._winner, self._turns = step, iter(())
        if not uses_plan:
            self._plan = None
        return step

    def _mark(self) -> _Mark:
        if self._position.sample.device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    @property
    def outcome(self) -> str:
        """One line: whether the plan is used, and the times."""
        if self._why is not None:
            return f"the whole step is not planned: {self._why}"[:300]
        if self._seconds is None:
            return "a plan of the whole step is being tried"
        plan, captured = (f"{seconds * 1e3:.3f} ms" for seconds in self._seconds)
        if self._plan is not None:
            return f"the whole step is planned: {plan}, with side lanes alone {captured}"
        return f"a plan of the whole step was tried and is not faster: {plan}, without it {captured}"

    def explain(self) -> list[str]:
        """The outcome, followed by the plan if it is used."""
        lines = self._plan.explain().splitlines() if self._plan is not None and self._seconds is not None else []
        return [f"  {self.outcome}", *(f"    {line}" for line in lines)]


def _is_over(mark: _Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds(begin: _Mark, end: _Mark) -> float:
    return end - begin if isinstance(end, float) else float(begin.elapsed_time(end)) / 1000
