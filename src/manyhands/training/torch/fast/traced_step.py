"""The whole step through the pipeline: traced, rewritten by passes, scheduled on lanes, checked, one CUDA graph.

    capture   the step as written, from the gather of its samples to its metrics, becomes a trace
    passes    redundant biases, fused BatchNorm, casts and counters together (``backends/torch/passes``)
    schedule  what the longest chain is waiting for on one lane; weight gradients, updates and short branches aside
    check     an independent proof of the schedule
    run       one CUDA graph, replayed for every step

The costs for the schedule are estimated by a roofline, not measured: it matters which operations nothing waits for.
The captured step does the same by dispatch modes, with the same kernels; where the results are equal to the bit, the
two can take turns (:mod:`.planned_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from manyhands.backends.planning import Replay
from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.facts import written_values
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes.training_step import rewrite
from manyhands.backends.torch.run.codegen import Plan
from manyhands.schedule.check import check
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Schedule, lanes_for, one_lane, schedule_by_slack
from manyhands.schedule.memory import Footprint, one_after_the_other, peak
from manyhands.schedule.memory_limit import thrifty
from manyhands.schedule.task import Task

_ASIDE = 2  # lanes beside the main one
_WAIT = 2e-6  # seconds that a wait between two lanes costs
# Multiplications and additions, and bytes, a second: those of a GPU of a data centre. Only their ratio matters.
_RATES = (400e12, 3e12)
Executor = Callable[[Trace, Plan], Replay]


class TracedStep:
    """The step as one CUDA graph on lanes.

    The first call plans, compares the plan's results with the captured step's, and makes a step.

    Args:
        step: The step as written.
        captured: The same step as a captured graph.
        device: Where it runs.
        lanes: Whether to use more than one lane.
        held: How many bytes lanes may hold beyond what one lane takes.
        executor: What runs the plan of a trace. Default: one CUDA graph.
    """

    def __init__(
        self,
        step: Callable[[], object],
        captured: Callable[[], object],
        device: torch.device,
        *,
        lanes: bool,
        held: int,
        executor: Executor | None = None,
    ) -> None:
        self._step, self._captured, self._device = step, captured, device
        self._lanes, self._held = lanes, held
        self._executor = executor or self._graph
        self._run: Callable[[], object] | None = None
        self._passes: list[str] = []
        self._schedule: Schedule | None = None
        self._why: str | None = None

    def __call__(self) -> None:
        trace, self._passes = rewrite(planning.trace(self._step, planning.call((), {}), guarded=False))
        self._schedule = schedule_of(trace, (self._device,), lanes=self._lanes, held=self._held)
        written = written_values(trace, [])
        with planning.untouched(trace, []) as put_back:
            run = self._executor(trace, planning.plan_of(self._schedule))
            put_back()
            of_capture = self._observed(self._captured, written)
            put_back()
            of_plan = self._observed(lambda: run.replay([]), written)
        if not all(map(torch.equal, of_plan, of_capture)):
            self._why = "its results are not those of the captured step to the bit"
            self._captured()
            return
        together = planning.together(trace)  # parameters get their gradients
        self._run = lambda: together(run.replay([]))
        self._run()

    def _graph(self, trace: Trace, plan: Plan) -> Replay:
        return planning.graph_run(trace, plan, [], (self._device,), reuse_outputs=True)

    def replay(self) -> None:
        assert self._run is not None
        self._run()

    def why_not(self) -> str | None:
        return self._why

    def explain(self) -> str:
        """Lanes and waits, and what each pass did."""
        assert self._schedule is not None
        schedule = self._schedule
        counts = f"{len(schedule.graph)} operations on {len(schedule.lanes)} lanes, {schedule.wait_count()} waits"
        return "\n".join([f"{counts}, all checked", *self._passes])

    def _observed(self, step: Callable[[], object], written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a step writes; the next call draws the same random numbers."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            step()
        return [tensor.detach().clone() for tensor in written]


def schedule_of(trace: Trace, devices: tuple[torch.device, ...], *, lanes: bool, held: int) -> Schedule:
    """The step on lanes, with at most so many bytes more than one lane takes."""
    tasks = [_estimated(trace, number, devices) for number in range(len(trace.steps))]
    whole = graph(tasks)
    if not lanes:
        return one_lane(whole)
    schedule = schedule_by_slack(whole, lanes_for(whole, _ASIDE + 1), wait_seconds=_WAIT)
    footprint = Footprint(*planning.footprint(trace))
    plain = peak(tasks, footprint, one_after_the_other(range(len(tasks))))
    schedule = thrifty(schedule, footprint, plain + held)
    check(schedule)
    return schedule


def _estimated(trace: Trace, number: int, devices: tuple[torch.device, ...]) -> Task:
    """A task with what it should cost; views and allocations cost nothing."""
    step = trace.steps[number]
    if step.task.is_view or step.node.target is torch.ops.aten.empty_strided.default:
        return replace(step.task, seconds=1e-9, share=0.0)
    seconds, share = planning.estimated(trace, number, devices, _RATES)
    return replace(step.task, seconds=seconds, share=share)
