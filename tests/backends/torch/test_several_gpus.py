"""Several GPUs in one function, planned without any: traced on fake tensors, the code of the run read and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from manyhands.backends.torch import planning  # noqa: E402
from manyhands.backends.torch.capture.trace import trace_of_graph  # noqa: E402
from manyhands.backends.torch.run import codegen  # noqa: E402
from manyhands.backends.torch.run import streams as torch_runs  # noqa: E402
from manyhands.parallel.candidates import candidates  # noqa: E402
from manyhands.parallel.costs import Costed  # noqa: E402
from manyhands.parallel.plan import Executor  # noqa: E402
from manyhands.parallel.trials import Trials  # noqa: E402
from manyhands.schedule.check import check  # noqa: E402
from manyhands.schedule.graph import graph  # noqa: E402
from manyhands.schedule.lanes import lanes_for, limit_memory, schedule  # noqa: E402
from manyhands.schedule.memory import one_after_the_other, peak  # noqa: E402

LOG: list[str] = []


class Stream:
    count = 0

    def __init__(self, device: Any) -> None:
        Stream.count += 1
        self.name = f"{torch.device(device)} {Stream.count}"

    def wait_event(self, event: Any) -> None:
        LOG.append(f"{self.name} waits for {event.after}")


class Event:
    after = "nothing"

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Stream) -> None:
        self.after = stream.name

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.after}")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    LOG.clear()
    Stream.count = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: LOG.append(f"on {stream.name}"))
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


def traced() -> tuple[Any, list[Any]]:
    x, first = torch.ones(4, 4, device="cuda:0"), torch.ones(4, 4, device="cuda:0")
    inputs = [x, first, torch.ones(4, 4, device="cuda:1")]
    return trace_of(two_layers, *inputs), inputs


def test_each_step_is_on_its_gpu_and_a_copy_between_them_is_a_task_of_the_one_that_gets_it() -> None:
    captured, _ = traced()
    places = {(step.task.name, step.task.device, step.task.kind) for step in captured.steps}
    assert ("_to_copy", "gpu:1", "copy") in places
    assert ("relu", "gpu:0", "compute") in places
    assert ("tanh", "gpu:1", "compute") in places
    (copy,) = [step for step in captured.steps if step.task.kind == "copy"]
    assert codegen.peer_source(copy) == torch.device("cuda:0")
    assert planning.device_of(captured) == (torch.device("cuda:0"), torch.device("cuda:1"))


def test_they_are_issued_at_every_call_on_lanes_of_each_gpu() -> None:
    captured, _ = traced()
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


def test_the_code_waits_across_gpus_and_copies_on_a_stream_of_the_source() -> None:
    captured, inputs = traced()
    measured = graph(captured.tasks)
    planned = schedule(measured, lanes_for(measured, 1))
    check(planned)
    plan = planned
    streams = torch_runs.streams_of(plan, (torch.device("cuda:0"), torch.device("cuda:1")))
    named = {str(lane): stream.name for lane, stream in zip(planned.lanes, streams, strict=True)}
    results = codegen.generate(captured, plan, streams).build()(inputs)
    assert [str(result.device) for result in results] == ["cuda:1", "cuda:0", "cuda:1"]
    producing, copying = named["gpu:0 compute 0"], named["gpu:1 copy 0"]
    consuming = named["gpu:1 compute 0"]
    wait = LOG.index(f"{copying} waits for {producing}", len(streams) - 1)  # the first ones are the run's beginning
    beside, current = LOG[wait + 1 : wait + 3]
    assert beside.startswith("on cuda:0 ")
    assert beside.removeprefix("on ") not in named.values()  # no other work stands in its way
    assert current == f"on {copying}"  # the result's memory belongs to the lane
    assert f"{consuming} waits for {copying}" in LOG[wait:]
    first = streams[codegen.gpu_lanes(captured, plan)[0]].name
    assert {line for line in LOG if line.startswith(f"{first} waits for")} >= {
        f"{first} waits for {name}" for name in named.values() if name != first
    }


def test_the_host_waits_for_the_copies_to_every_gpu() -> None:
    def function(x: Any) -> Any:
        return x.to("cuda:0").sin(), x.to("cuda:1").sin()

    inputs = [torch.ones(4)]
    captured = trace_of(function, *inputs)
    planned = schedule(graph(captured.tasks), lanes_for(graph(captured.tasks), 1))
    plan = planned
    streams = torch_runs.streams_of(plan, (torch.device("cuda:0"), torch.device("cuda:1")))
    codegen.generate(captured, plan, streams).build()(inputs)
    copying = {stream.name for lane, stream in zip(planned.lanes, streams, strict=True) if lane.kind == "copy in"}
    assert len(copying) == 2
    assert {line.removeprefix("host waits for ") for line in LOG if line.startswith("host")} == copying


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
