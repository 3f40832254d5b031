"""The code of a run on streams, read without a GPU: who waits for whom, and where the host does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch")
from graph_cases import traced  # noqa: E402

from manyhands.backends.torch.run import codegen  # noqa: E402
from manyhands.backends.torch.run import streams as torch_runs  # noqa: E402
from manyhands.schedule.graph import graph  # noqa: E402
from manyhands.schedule.lanes import Lane, schedule  # noqa: E402
from manyhands.schedule.task import Task  # noqa: E402

LOG: list[str] = []


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

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
    monkeypatch.setattr(torch.cuda, "Event", Event)
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
    plan = made
    streams = [Stream(lane.kind) for lane in lanes]
    (result,) = codegen.generate(found, plan, streams).build()(tensors)  # type: ignore[arg-type]
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
    before: list[set[int]] = [set() for _ in tasks]
    last: dict[int, int] = {}
    for task in made.order:
        past = [*made.waits.get(task, ()), *([last[made.lane_of[task]]] if made.lane_of[task] in last else [])]
        before[task] = {task}.union(*(before[one] for one in past))
        last[made.lane_of[task]] = task
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
