"""The code of a run on streams, read and run without a GPU: who waits for whom, and where the host does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from graph_cases import scheduled, traced
from hypothesis import given, settings
from schedule_cases import known_before
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import trace_of_graph
from manyhands.backends.torch.run import codegen
from manyhands.backends.torch.run import streams as torch_runs
from manyhands.parallel.candidates import candidates
from manyhands.parallel.costs import Costed
from manyhands.parallel.plan import Executor
from manyhands.parallel.trials import Trials
from manyhands.schedule.check import check
from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Lane, lanes_for, limit_memory, schedule
from manyhands.schedule.memory import one_after_the_other, peak

LOG: list[str] = []


class Stream:
    count = 0

    def __init__(self, device: Any, name: str = "") -> None:
        Stream.count += 1
        self.name = name or f"{torch.device(device)} {Stream.count}"

    def wait_event(self, event: Any) -> None:
        LOG.append(f"{self.name} waits for {event.after}")


class Event:
    after = "nothing"

    def record(self, stream: Stream) -> None:
        self.after = stream.name

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.after}")


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    Stream.count = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: LOG.append(f"on {stream.name}"))


def mixed() -> tuple[Any, list[torch.Tensor]]:
    """On the GPU, to the host, on the CPU, to the GPU, on the GPU: said of operations that are all on the CPU here."""
    x = torch.ones(2, 2)
    found = traced(lambda x: x.sin().cos().exp().neg().tanh(), x)
    places = {
        "sin": ("gpu:0", "compute"),
        "cos": ("gpu:0", "copy out"),
        "exp": ("cpu", "compute"),
        "neg": ("gpu:0", "copy in"),
        "tanh": ("gpu:0", "compute"),
    }
    for step in found.steps:
        device, kind = places[step.task.name]
        step.task = replace(step.task, device=device, kind=kind)  # type: ignore[arg-type]
    return found, [x]


def test_the_host_waits_before_it_reads_a_copy_and_streams_do_not_wait_for_the_host() -> None:
    found, tensors = mixed()
    kinds = dict.fromkeys((task.device, task.kind) for task in found.tasks)
    lanes = [Lane(device, kind) for device, kind in kinds]
    made = schedule(graph(found.tasks), lanes)
    streams = [Stream(lane.device, lane.kind) for lane in lanes]
    (result,) = codegen.generate(found, made, streams).build()(tensors)  # type: ignore[arg-type]
    assert torch.equal(result, tensors[0].sin().cos().exp().neg().tanh())
    begin = ["copy out waits for compute", "copy in waits for compute"]
    work = [
        *("copy out waits for compute", "on copy out", "host waits for copy out", "on copy in"),
        *("compute waits for copy in", "on compute"),
    ]
    # The last: as after a plain copy to the GPU, its source may be written to.
    end = ["compute waits for copy out", "compute waits for copy in", "host waits for copy in"]
    assert begin + work + end == LOG
    assert torch_runs.why_no_graph(found) is not None
    assert torch_runs.copies_or_computes_on_host(found)


MEMORIES = st.frozensets(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(MEMORIES, MEMORIES, st.floats(1e-6, 1e-3)), max_size=25), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_memory_goes_as_soon_as_its_lane_knows_all_users_to_be_over(program: Any, count: int) -> None:
    """Against the definition: the first task of the lane that all users come before, or are."""
    tasks = [Task("t", reads, writes, "gpu:0", seconds=seconds) for reads, writes, seconds in program]
    made = schedule(graph(tasks), [Lane("gpu:0", "compute", number) for number in range(count)])
    users = {m: {i for i, task in enumerate(tasks) if m in task.reads | task.writes} for m in range(6)}
    makers = {m: next((i for i, task in enumerate(tasks) if m in task.writes), None) for m in range(6)}
    wanted = {m: ({made.lane_of[maker]}, users[m]) for m, maker in makers.items() if maker is not None}
    before = known_before(made)
    expected = {}
    for memory, ((lane,), own) in wanted.items():
        known = [task for task in made.order if made.lane_of[task] == lane and own <= before[task]]
        if known:
            expected[memory] = known[0]
    assert codegen.points(made, wanted) == expected


def test_a_host_number_in_a_kernel_is_not_captured() -> None:
    found, _ = mixed()
    for step in found.steps:
        step.task = replace(step.task, device="gpu:0", kind="compute")
    assert "number from the host" in (torch_runs.why_no_graph(found) or "")


# Several GPUs in one function, traced on fake tensors


@pytest.fixture
def fake_gpus() -> Iterator[None]:
    with FakeTensorMode():
        yield


def two_layers(x: Any, first: Any, second: Any) -> Any:
    """As in the book: a layer on each of two GPUs, beside it something else on each."""
    y = (x @ first).relu()
    z = (y.to("cuda:1") @ second).tanh()
    return z, (x @ first.t()).sin(), second.exp()


def trace_of(function: Any, *inputs: Any) -> Any:
    """The trace of a function of fake tensors."""
    return trace_of_graph(make_fx(lambda *tensors: tree_leaves(function(*tensors)))(*inputs))


def traced_on_two() -> tuple[Any, list[Any]]:
    x, first = torch.ones(4, 4, device="cuda:0"), torch.ones(4, 4, device="cuda:0")
    inputs = [x, first, torch.ones(4, 4, device="cuda:1")]
    return trace_of(two_layers, *inputs), inputs


@pytest.mark.usefixtures("fake_gpus")
def test_each_step_is_on_its_gpu_and_a_copy_between_them_is_a_task_of_the_one_that_gets_it() -> None:
    captured, _ = traced_on_two()
    places = {(step.task.name, step.task.device, step.task.kind) for step in captured.steps}
    assert ("_to_copy", "gpu:1", "copy") in places
    assert ("relu", "gpu:0", "compute") in places
    assert ("tanh", "gpu:1", "compute") in places
    (copy,) = [step for step in captured.steps if step.task.kind == "copy"]
    assert codegen.peer_source(copy) == torch.device("cuda:0")
    assert planning.device_of(captured) == (torch.device("cuda:0"), torch.device("cuda:1"))


@pytest.mark.usefixtures("fake_gpus")
def test_they_are_issued_at_every_call_on_lanes_of_each_gpu() -> None:
    captured, _ = traced_on_two()
    assert "several GPUs (gpu:0, gpu:1)" in str(torch_runs.why_no_graph(captured))
    trials = Trials(captured, [], planning.device_of(captured), 1.3, reuse_outputs=False, measure=False)
    trials.costed = Costed(captured.tasks)  # measured on no GPU
    tried = candidates(trials)
    assert tried[0].method.lanes == "one lane of each kind"
    assert {candidate.method.executor for candidate in tried} == {Executor.STREAMS}
    for made in (candidate.schedule for candidate in tried):
        check(made)
        for task, lane in enumerate(made.lane_of):
            assert made.lanes[lane].device == made.graph.tasks[task].device


@pytest.mark.usefixtures("fake_gpus")
def test_the_code_waits_across_gpus_and_copies_on_a_stream_of_the_source() -> None:
    captured, inputs = traced_on_two()
    planned = scheduled(captured, 1, captured.tasks)
    streams = torch_runs.streams_of(planned, (torch.device("cuda:0"), torch.device("cuda:1")))
    named = {str(lane): stream.name for lane, stream in zip(planned.lanes, streams, strict=True)}
    results = codegen.generate(captured, planned, streams).build()(inputs)
    assert [str(result.device) for result in results] == ["cuda:1", "cuda:0", "cuda:1"]
    producing, copying = named["gpu:0 compute 0"], named["gpu:1 copy 0"]
    consuming = named["gpu:1 compute 0"]
    wait = LOG.index(f"{copying} waits for {producing}", len(streams) - 1)  # the first ones are the run's beginning
    beside, current = LOG[wait + 1 : wait + 3]
    assert beside.startswith("on cuda:0 ")
    assert beside.removeprefix("on ") not in named.values()  # no other work stands in its way
    assert current == f"on {copying}"  # the result's memory belongs to the lane
    assert f"{consuming} waits for {copying}" in LOG[wait:]
    first = streams[codegen.gpu_lanes(captured, planned)[0]].name
    assert {line for line in LOG if line.startswith(f"{first} waits for")} >= {
        f"{first} waits for {name}" for name in named.values() if name != first
    }


@pytest.mark.usefixtures("fake_gpus")
def test_the_host_waits_for_the_copies_to_every_gpu() -> None:
    def function(x: Any) -> Any:
        return x.to("cuda:0").sin(), x.to("cuda:1").sin()

    inputs = [torch.ones(4)]
    captured = trace_of(function, *inputs)
    planned = scheduled(captured, 1, captured.tasks)
    streams = torch_runs.streams_of(planned, (torch.device("cuda:0"), torch.device("cuda:1")))
    codegen.generate(captured, planned, streams).build()(inputs)
    copying = {stream.name for lane, stream in zip(planned.lanes, streams, strict=True) if lane.kind == "copy in"}
    assert len(copying) == 2
    assert {line.removeprefix("host waits for ") for line in LOG if line.startswith("host")} == copying


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.parametrize("shape", [(), (4,)])
def test_writing_to_memory_of_the_host_is_not_captured_and_is_waited_for(shape: tuple[int, ...]) -> None:
    def function(x: Any, host: Any) -> Any:
        host.copy_(x.sum() if not shape else x, non_blocking=True)
        return x + 1

    captured = trace_of(function, torch.ones(4, device="cuda:0"), torch.ones(shape))
    assert torch_runs.why_no_graph(captured) is not None
    (step,) = [step for step in captured.steps if step.task.name == "copy_"]
    assert "True" not in codegen.call_text(step.node, codegen.Code(streams=True))
    assert "non_blocking" not in codegen.call_text(step.node, codegen.Code(streams=True))


@pytest.mark.usefixtures("fake_gpus")
def test_a_lane_that_runs_ahead_of_copies_to_the_host_is_held_back() -> None:
    """The engine adds the waits, and the code lets memory go by them: both count the same bytes."""

    def function(x: Any) -> Any:
        return [(x * number).to("cpu") for number in range(60)]

    captured = trace_of(function, torch.ones(1000, 1000, device="cuda:0"))
    measured = graph([replace(task, seconds=1e-4 if task.kind == "compute" else 1e-3) for task in captured.tasks])
    footprint = planning.footprint(captured)

    def peak_of(made: Any) -> int:
        released_after = codegen.release_points(captured, made)
        return peak(measured.tasks, footprint, one_after_the_other(made.order), released_after)

    planned = schedule(measured, lanes_for(measured, 1))
    assert peak_of(planned) == (1 + 60 + 60) * 4_000_000
    held_back = limit_memory(planned, peak_of, (1 + 60 + 10) * 4_000_000)
    check(held_back)
    assert peak_of(held_back) <= (1 + 60 + 10) * 4_000_000
