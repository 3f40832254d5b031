"""Runs a traced function on lanes: straight-line code, CUDA streams, one CUDA graph.

The code of a run is generated: one line per operation, in the order in which the schedule issues them, with the waits
between streams where the schedule has them. It is issued by one thread, and captured into a CUDA graph, which is then
replayed: the host is out of the way.

Memory: a result belongs to the stream it was made on, and its memory is used again by later work on that stream. So
it is let go where the schedule's own waits have brought that stream behind all of its users, and not earlier: no luck
with timing, no ``record_stream``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch_trace import Step, Trace

_aten = torch.ops.aten


@dataclass(frozen=True)
class Plan:
    """What the engine hands over: lanes by their kind, a lane per step, the order of issue, the waits."""

    kinds: Sequence[str]
    lane_of: Sequence[int]
    order: Sequence[int]
    waits: Mapping[int, tuple[int, ...]]


def one_lane(trace: Trace) -> Plan:
    """Everything in the program's order on one lane."""
    count = len(trace.steps)
    return Plan(["compute"], [0] * count, list(range(count)), {})


# Straight-line code


@dataclass
class Code:
    """The source of a run, and the objects that its names stand for."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)

    def name(self, value: Any) -> str:
        """A name for an object that cannot be written out."""
        key = f"k{len(self.names)}"
        self.names[key] = value
        return key

    def build(self) -> Callable[..., Any]:
        source = "def run(inputs):\n" + "\n".join(f"    {line}" for line in self.lines)
        exec(compile(source, "<manyhands run>", "exec"), self.names)
        return self.names["run"]  # type: ignore[no-any-return]


def generate(trace: Trace, plan: Plan, streams: Sequence[torch.cuda.Stream] | None) -> Code:
    """The code of a run; without streams (one lane, or a CPU) it has no waits."""
    code = Code()
    inputs = "".join(f"{node.name}, " for node in trace.inputs)
    if inputs:
        code.lines.append(f"{inputs}= inputs")
    for node in trace.constants:
        code.lines.append(f"{node.name} = {code.name(getattr(trace.module, str(node.target)))}")
    marks = _Marks(trace, plan, streams, code)
    marks.begin()
    let_go = _let_go(trace, plan)
    for task in plan.order:
        marks.before(task)
        for node in trace.steps[task].nodes:
            code.lines.append(f"{node.name} = {_call(node, code)}")
        marks.after(task)
        if gone := let_go.get(task):
            code.lines.append(f"del {', '.join(gone)}")
    marks.end()
    code.lines.append(f"return [{', '.join(_argument(value, code) for value in trace.outputs)}]")
    return code


def _call(node: Node, code: Code) -> str:
    if node.target.__name__ == "getitem":  # type: ignore[union-attr]
        return f"{_argument(node.args[0], code)}[{node.args[1]}]"
    given = [_argument(value, code) for value in node.args]
    given += [f"{name}={_argument(value, code)}" for name, value in node.kwargs.items()]
    target = to_host if _is_to_host(node) else node.target
    return f"{code.name(target)}({', '.join(given)})"


def _argument(value: Any, code: Code) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(one, code) for one in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    return code.name(value)


def _is_to_host(node: Node) -> bool:
    if node.target is not _aten._to_copy.default or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    source = node.args[0]
    return (
        node.meta["val"].device.type == "cpu" and isinstance(source, Node) and source.meta["val"].device.type == "cuda"
    )


def to_host(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """A copy into page-locked memory that does not wait; the run waits for all of them at its end."""
    if dtype is not None:
        tensor = tensor.to(dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Marks:
    """The lines about streams: which one is current, what it waits for, where others may wait."""

    def __init__(self, trace: Trace, plan: Plan, streams: Sequence[torch.cuda.Stream] | None, code: Code) -> None:
        self._plan, self._code, self._streams = plan, code, streams
        self._waited = {other for others in plan.waits.values() for other in others}
        self._used = sorted(set(plan.lane_of)) if streams else []
        self._names = {lane: code.name(streams[lane]) for lane in self._used} if streams else {}
        self._set = code.name(torch.cuda.set_stream)
        self._events: dict[int, str] = {}
        self._current = 0

    def begin(self) -> None:
        """All lanes begin behind the first one, which is behind the caller's stream."""
        if len(self._used) > 1:
            start = self._code.name(torch.cuda.Event())
            self._code.lines.append(f"{start}.record({self._names[0]})" if 0 in self._names else "pass")
            for lane in self._used:
                if lane:
                    self._code.lines.append(f"{self._names[lane]}.wait_event({start})")

    def before(self, task: int) -> None:
        if not self._streams:
            return
        lane = self._plan.lane_of[task]
        for other in self._plan.waits.get(task, ()):
            self._code.lines.append(f"{self._names[lane]}.wait_event({self._events[other]})")
        if lane != self._current:
            self._code.lines.append(f"{self._set}({self._names[lane]})")
            self._current = lane

    def after(self, task: int) -> None:
        if self._streams and task in self._waited:
            self._events[task] = self._code.name(torch.cuda.Event())
            self._code.lines.append(f"{self._events[task]}.record({self._names[self._plan.lane_of[task]]})")

    def end(self) -> None:
        """The first lane waits for all others: what comes after the run comes after all of it."""
        for lane in self._used:
            if lane:
                done = self._code.name(torch.cuda.Event())
                self._code.lines.append(f"{done}.record({self._names[lane]})")
                self._code.lines.append(f"{self._names[0]}.wait_event({done})")
        if self._current:
            self._code.lines.append(f"{self._set}({self._names[0]})")


# When memory is let go


def _let_go(trace: Trace, plan: Plan) -> dict[int, list[str]]:
    """After which task which names may be deleted: when the stream that made them knows all users to be over."""
    kept = {memory for node in [*trace.inputs, *trace.constants] for memory in trace.storages[node]}
    kept |= {memory for value in trace.outputs if isinstance(value, Node) for memory in trace.storages[value]}
    makers: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    for task, step in enumerate(trace.steps):
        for memory in step.task.writes | step.task.reads:
            users.setdefault(memory, set()).add(task)
        for memory in step.task.writes:
            makers.setdefault(memory, task)
        mine = _memories(step, trace)
        for memory in mine:
            # A tuple of results, and a view, keep their memory alive as long as their name is there.
            names.setdefault(memory, []).extend(node.name for node in step.nodes)
    shared: dict[str, set[int]] = {}
    for memory, ones in names.items():
        for name in ones:
            shared.setdefault(name, set()).add(memory)
    points = _points(plan, {m: (plan.lane_of[makers[m]], users[m]) for m in makers if m in names and m not in kept})
    place = {task: number for number, task in enumerate(plan.order)}
    let_go: dict[int, list[str]] = {}
    for name, memories in shared.items():
        if all(memory in points for memory in memories):
            last = max((points[memory] for memory in memories), key=place.__getitem__)
            let_go.setdefault(last, []).append(name)
    return let_go


def _memories(step: Step, trace: Trace) -> frozenset[int]:
    return frozenset().union(*(trace.storages[node] for node in step.nodes))


def _points(plan: Plan, wanted: Mapping[int, tuple[int, Iterable[int]]]) -> dict[int, int]:
    """For each memory the first task of its lane at which all its users are known to be over."""
    place: dict[int, int] = {}
    counts: dict[int, int] = {}
    for task in plan.order:
        lane = plan.lane_of[task]
        place[task] = counts.get(lane, 0)
        counts[lane] = place[task] + 1
    waiting: dict[int, list[tuple[int, dict[int, int]]]] = {}
    for memory, (lane, users) in wanted.items():
        needed: dict[int, int] = {}
        for user in users:
            other = plan.lane_of[user]
            needed[other] = max(needed.get(other, -1), place[user])
        waiting.setdefault(lane, []).append((memory, needed))
    clocks: dict[int, dict[int, int]] = {}
    after: dict[int, dict[int, int]] = {}
    found: dict[int, int] = {}
    for task in plan.order:
        lane = plan.lane_of[task]
        clock = clocks.setdefault(lane, {})
        for other in plan.waits.get(task, ()):
            for key, value in after[other].items():
                clock[key] = max(clock.get(key, -1), value)
        clock[lane] = place[task]
        after[task] = dict(clock)
        left = []
        for memory, needed in waiting.get(lane, ()):
            if all(clock.get(key, -1) >= value for key, value in needed.items()):
                found[memory] = task
            else:
                left.append((memory, needed))
        waiting[lane] = left
    return found


# Replaying


class GraphRun:
    """A run captured in one CUDA graph. Inputs that stay where they were are read in place, others are copied in."""

    def __init__(self, trace: Trace, plan: Plan, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._static = list(inputs)
        self._streams = [torch.cuda.Stream(device) for _ in plan.kinds]
        self._run = generate(trace, plan, self._streams).build()
        current = torch.cuda.current_stream(device)
        self._streams[0].wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(self._streams[0]):
            self._run(self._static)  # warms up libraries and, on every stream, their workspaces
        current.wait_stream(self._streams[0])
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=self._streams[0]):
            self.outputs: list[Any] = self._run(self._static)
        self.host_outputs = any(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in self.outputs)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Run; what comes back is overwritten by the next replay."""
        into, source = [], []
        for own, given in zip(self._static, inputs, strict=True):
            if own is not given and own.data_ptr() != given.data_ptr():
                into.append(own)
                source.append(given)
        if into:
            torch._foreach_copy_(into, source)
        self.graph.replay()
        if self.host_outputs:
            torch.cuda.current_stream(self._device).synchronize()
        return self.outputs
