"""A plan of the whole step against the captured one: both make real steps, and the faster one goes on."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captured_step_cases import COUNT, CPU, eager_step, without_gpu
from torch import nn
from training_cases import vectors

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.errors import BadSettings
from manyhands.parallel.function import Parallel
from manyhands.parallel.plan import Planned
from manyhands.parallel.way import AS_WRITTEN, TO_THE_BIT, Exactness, Executor, Way, close
from manyhands.training.options import Step
from manyhands.training.settings import Settings
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast import build, planned_step
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.planned_step import ParallelPlan, PlannedStep, as_written
from manyhands.training.torch.fast.position import Position
from manyhands.training.torch.step.average import Average, Averaging

RACE = 1 + 3 * 2 * 9  # planning, and in each of three turns a warm-up and eight timed steps of each


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = vectors(1)[0].shape[1]
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(x) for tower in self.towers]).mean(0)


def job() -> tuple[Any, Position, Callable[[], None]]:
    torch.manual_seed(0)
    eager, data = eager_step(Towers().double()), Arrays(vectors(COUNT))
    eager.clip = 1.0
    position = Position(COUNT, CPU)
    return eager, position, as_written(eager, data, position, torch.arange(4))


@pytest.mark.parametrize("averages", [False, True])
def test_whoever_makes_a_step_it_is_the_same(averages: bool) -> None:
    """The real planner: whether its plan is used depends on the machine, what comes of the steps does not."""
    (eager, position, step), (plain, _, plainly) = job(), job()
    for twin in (eager, plain):
        twin.optimizer.zero_grad()
        if averages:
            twin.average = Average(twin.model, Averaging(0.9))
    made = PlannedStep(ParallelPlan(step), step, position)
    for run in (made, plainly):
        torch.manual_seed(1)
        for _ in range(20):
            run()
    assert int(position.sample) == 80
    assert int(position.step) == 20
    for parameter, other in zip(eager.parameters, plain.parameters, strict=True):
        assert torch.equal(parameter, other)
    assert torch.equal(eager.metrics.sums, plain.metrics.sums)
    if averages:
        assert all(map(torch.equal, eager.average.tensors, plain.average.tensors))
        assert not all(map(torch.equal, eager.average.tensors, eager.parameters))


def test_a_step_can_be_planned() -> None:
    """All that it reaches can be watched, the trainer's own code included."""
    _, position, step = job()
    step()  # makes the optimizer's state
    fast = Parallel(step, planning, synchronous=True)
    fast()
    assert "synchronous" in fast.explain(), fast.explain()
    assert int(position.step) == 2


def test_a_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what is shown of a job changes while it runs."""
    planned = []
    plan = Parallel._plan
    monkeypatch.setattr(Parallel, "_plan", lambda *arguments, **how: planned.append(1) or plan(*arguments, **how))
    eager, position, step = job()
    made = PlannedStep(ParallelPlan(step), step, position)
    for _ in range(20):
        made()
        eager.metrics.peek()
    assert len(planned) == 1


TWO_LANES = Way(Executor.GRAPH, "2 lanes")


class Plan:
    """Stands in for the engine: a plan that is there, or none, or an error."""

    def __init__(
        self, way: Way = TWO_LANES, exactness: Exactness | None = TO_THE_BIT, notes: tuple[str, ...] = ()
    ) -> None:
        self.planned = Planned(lambda *_: self(), way=way, exactness=exactness, notes=list(notes))
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self) -> None:
        if self.error is not None:
            raise self.error
        self.calls += 1

    def explain(self) -> str:
        return "step: run as 2 lanes"


class Captured:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PlannedStep, Plan, Captured]]:
    def begin(plan: Plan, planned: float = 1.0, captured: float = 1.0) -> tuple[PlannedStep, Plan, Captured]:
        """Steps that take so many seconds, by the clock."""
        one = Captured()
        monkeypatch.setattr(planned_step, "Parallel", lambda *_, **__: plan)
        now = 0.0

        def clock() -> Iterator[float]:
            nonlocal now
            while True:
                before = plan.calls
                yield now
                now += planned if plan.calls > before else captured
                yield now

        times = clock()
        monkeypatch.setattr(PlannedStep, "_mark", lambda _: next(times))
        return PlannedStep(ParallelPlan(lambda: None), one, Position(8, CPU)), plan, one

    return begin


def test_the_faster_one_goes_on(race: Any) -> None:
    made, plan, captured = race(Plan(), planned=1.0, captured=2.0)
    for _ in range(RACE + 10):
        made()
    assert (plan.calls, captured.calls) == (1 + 27 + 10, 27)
    assert made.outcome == "the whole step is planned: 1000.000 ms, with side lanes alone 2000.000 ms"
    assert made.explain()[1:] == ["    step: run as 2 lanes"]


def test_a_plan_that_is_not_faster_is_left(race: Any) -> None:
    made, plan, captured = race(Plan(), planned=2.0, captured=1.0)
    for _ in range(RACE + 10):
        made()
    assert (plan.calls, captured.calls) == (1 + 27, 27 + 10)
    assert "is not faster: 2000.000 ms, without it 1000.000 ms" in made.outcome
    assert made.explain() == [f"  {made.outcome}"]


def test_the_loser_is_let_go(race: Any) -> None:
    made, _, captured = race(Plan(), planned=1.0, captured=2.0)
    kept = weakref.ref(captured)
    del captured
    for _ in range(RACE + 1):
        made()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(AS_WRITTEN, None, ("cannot be traced: it prints",)), "it prints"),
        (Plan(exactness=close(2e-10)), "not those of plain execution to the bit"),
    ],
)
def test_without_a_plan_the_captured_step_goes_on(race: Any, plan: Plan, why: str) -> None:
    made, _, captured = race(plan)
    for _ in range(5):
        made()
    assert (plan.calls, captured.calls) == (1, 4)
    assert "the whole step is not planned" in made.outcome
    assert why in made.outcome


def test_planning_that_fails_costs_no_step(race: Any) -> None:
    made, plan, captured = race(Plan())
    plan.error = MemoryError("too much")
    for _ in range(3):
        made()
    assert captured.calls == 3
    assert "MemoryError: too much" in made.outcome


def test_a_step_that_fails_half_way_is_an_error() -> None:
    position = Position(8, CPU)

    def half() -> None:
        position.advance(4)
        raise ValueError("half way")

    made = PlannedStep(ParallelPlan(half), lambda: None, position)
    with pytest.raises(ValueError, match="half way"):
        made()


def test_one_of_two() -> None:
    with pytest.raises(BadSettings, match="choose one"):
        mh.Trainer(1, step=Step(compile=True, parallel=True), quiet=True)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_step_with_tuned_convolutions_is_not_planned(tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan and the captured step take turns, so their results must have the same bits."""
    without_gpu(monkeypatch)
    eager, data = eager_step(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten())), Arrays(vectors(16))
    graph = GraphStep(eager, data, 16, compiled=False, changing_rate=False, parallel=True, tuned_convolutions=tuned)
    if tuned:
        graph._convolutions.problems["a convolution of the warm-up"] = 1
    captured: Any = lambda: None  # noqa: E731
    step = graph._with_plan(types.SimpleNamespace(window=torch.arange(16), redundant=None), captured)
    assert (step is captured) == tuned
    assert any("convolutions are tuned" in note for note in graph.notes()) == tuned


@pytest.mark.parametrize(
    ("parallel", "own_norms", "tuned"), [(None, False, True), (True, False, False), (True, True, True)]
)
def test_convolutions_are_tuned_unless_the_step_is_to_be_planned(
    parallel: bool | None, own_norms: bool, tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with our kernels for normalisation is not planned, so nothing speaks against tuning."""
    without_gpu(monkeypatch)
    monkeypatch.setattr(build, "has_own_kernels", lambda eager: own_norms)
    monkeypatch.setattr(build, "GraphStep", lambda *_, **features: features)
    settings = Settings(batch_size=16, step=Step(parallel=parallel))
    features: Any = build.fast_step(eager_step(nn.Conv2d(1, 1, 1)), Arrays(vectors(16)), settings, changing_rate=False)
    assert features["tuned_convolutions"] is tuned
