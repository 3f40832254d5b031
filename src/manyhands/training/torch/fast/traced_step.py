"""The whole step through the pipeline: traced, rewritten by passes, scheduled on lanes, checked, one CUDA graph.

    capture   trace the step as written, from the gather of its samples to its metrics
    passes    leave out redundant biases, fuse BatchNorm, batch casts and counters (``backends/torch/passes``)
    schedule  the critical path on one lane; weight gradients, updates and short branches on the others
    check     prove the schedule independently
    run       one CUDA graph, replayed for every step

The schedule uses costs from a roofline model, not measurements: what matters is which operations nothing waits for.
The captured step does the same with dispatch modes and the same kernels. If the results are equal to the bit, the two
can alternate (:mod:`.planned_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from manyhands.amounts import counted
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
from manyhands.schedule.memory_limit import limit_memory
from manyhands.schedule.task import Task

_ASIDE = 2  # lanes beside the main one
_WAIT = 2e-6  # seconds that a wait between two lanes costs
# Floating-point operations and bytes per second, about those of a data-centre GPU. Only their ratio matters.
_RATES = (400e12, 3e12)
Executor = Callable[[Trace, Plan], Replay]


class TracedStep:
    """The step as one CUDA graph on lanes.

    The first call plans, compares the plan's results with the captured step's, and runs one step.

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
        together = planning.together(trace)  # this sets the parameters' gradients
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
        counts = (
            f"{counted(len(schedule.graph), 'operation')} on {counted(len(schedule.lanes), 'lane')}, "
            f"{counted(schedule.wait_count(), 'wait')}"
        )
        return "\n".join([f"{counts}, all checked", *self._passes])

    def _observed(self, step: Callable[[], object], written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the step and return copies of the tensors it writes; the next call draws the same random numbers."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            step()
        return [tensor.detach().clone() for tensor in written]


def schedule_of(trace: Trace, devices: tuple[torch.device, ...], *, lanes: bool, held: int) -> Schedule:
    """A schedule of the step on lanes that takes at most ``held`` bytes more memory than one lane."""
    tasks = [_estimated(trace, number, devices) for number in range(len(trace.steps))]
    whole = graph(tasks)
    if not lanes:
        return one_lane(whole)
    schedule = schedule_by_slack(whole, lanes_for(whole, _ASIDE + 1), wait_seconds=_WAIT)
    footprint = Footprint(*planning.footprint(trace))
    plain = peak(tasks, footprint, one_after_the_other(range(len(tasks))))
    schedule = limit_memory(schedule, footprint, plain + held)
    check(schedule)
    return schedule


def _estimated(trace: Trace, number: int, devices: tuple[torch.device, ...]) -> Task:
    """A task with its estimated cost; views and allocations cost nothing."""
    step = trace.steps[number]
    if step.task.is_view or step.node.target is torch.ops.aten.empty_strided.default:
        return replace(step.task, seconds=1e-9, share=0.0)
    seconds, share = planning.estimated(trace, number, devices, _RATES)
    return replace(step.task, seconds=seconds, share=share)
