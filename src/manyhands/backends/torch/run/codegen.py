"""Generates the code of a run on lanes: straight-line Python, CUDA streams, and the waits between them.

The code has one line per operation, in the order in which the schedule issues them, and the schedule's waits between
streams. One thread runs it. That thread also executes CPU operations that come between GPU operations, after it has
waited for the copies that they read. :mod:`.streams` and :mod:`.cuda_graph` run the code.

Memory: a result belongs to the stream that computed it, and later work on that stream reuses its memory. So a result is
freed only at a point where the schedule's waits already order that stream after all users of the result: nothing
depends on timing, and no ``record_stream`` is needed.
"""

from __future__ import annotations

import itertools
import linecache
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import Node

from manyhands.backends.torch.capture.trace import Trace, TracedStep
from manyhands.backends.torch.run.bindings import native
from manyhands.schedule.lanes import Clocks, Schedule

_aten = torch.ops.aten
_numbers = itertools.count()
_Key = TypeVar("_Key", int, str)

# The start and end of each task: CUDA events, or seconds on the host's clock.
Stamps = dict[int, list[Any]]


# Functions that are generated at run time: tracebacks show their lines, and debuggers find their source


def function(label: str, source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function that ``source`` defines; ``names`` are its globals, ``label`` the file's name in tracebacks."""
    filename = f"<manyhands {label} {next(_numbers)}>"
    exec(compile(source, filename, "exec"), names)
    defined: Callable[..., Any] = names.pop(source.partition("def ")[2].partition("(")[0])
    # Without a modification time, linecache does not look for the file.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(defined, linecache.cache.pop, filename, None)
    return defined


# Straight-line code


@dataclass
class Code:
    """The source of a run, and the objects that its names refer to."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    streams: bool = False  # whether copies between devices are issued without waiting for them
    static: bool = False
    stamps: Stamps | None = None

    def name(self, value: Any) -> str:
        """A name for an object that has no source form."""
        key = f"k{len(self.names)}"
        self.names[key] = value
        return key

    def build(self) -> Callable[..., Any]:
        source = "def run(inputs):\n" + "\n".join(f"    {line}" for line in self.lines)
        return function("run", source, self.names)


def generate(
    trace: Trace,
    schedule: Schedule,
    streams: Sequence[torch.cuda.Stream],
    *,
    static: bool = False,
    stamps: Stamps | None = None,
) -> Code:
    """The code of a run on a stream for each lane.

    ``static``: copies to the host go to the same memory on every run, which a CUDA graph requires. ``stamps`` receives
    the start and end of every task: two CUDA events, or two times of the host's clock.
    """
    code = Code(streams=True, static=static, stamps=stamps)
    inputs = "".join(f"{node.name}, " for node in trace.inputs)
    if inputs:
        code.lines.append(f"{inputs}= inputs")
    for node in trace.constants:
        code.lines.append(f"{node.name} = {code.name(trace.constant(node))}")
    marks = _Marks(trace, schedule, streams, code)
    marks.begin()
    released_after = _releases(trace, schedule)
    for task in schedule.order:
        marks.before(task)
        marks.stamp(task)
        for node in trace.steps[task].nodes:
            code.lines.append(f"{node.name} = {call_text(node, code)}")
        marks.stamp(task)
        marks.after(task)
        if gone := released_after.get(task):
            code.lines.append(f"del {', '.join(gone)}")
    marks.end()
    code.lines.append(f"return [{', '.join(argument_text(value, code) for value in trace.outputs)}]")
    return code


def call_text(node: Node, code: Code) -> str:
    """The call of an operation as source; objects without a source form get a name in the code."""
    if node.target.__name__ == "getitem":  # type: ignore[union-attr]
        return f"{argument_text(node.args[0], code)}[{node.args[1]}]"
    arguments = [argument_text(value, code) for value in node.args]
    if code.streams and _copies(node, "cuda", "cpu"):
        return f"{code.name(_to_host(node, static=code.static))}({arguments[0]})"
    named = dict(node.kwargs)
    if code.streams and node.target is _aten.copy_.default and node.meta["val"].device.type == "cpu":
        # The issuing thread copies synchronously, on the current stream: the source may be freed right after the copy.
        arguments, named = arguments[:2], {}
    if code.streams and _copies(node, "cpu", "cuda"):
        named["non_blocking"] = True
    arguments += [f"{name}={argument_text(value, code)}" for name, value in named.items()]
    return f"{code.name(native(node))}({', '.join(arguments)})"


def argument_text(value: Any, code: Code) -> str:
    """An argument as source: the name of an earlier result, or a value."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(argument_text(item, code) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    return code.name(value)


def _copies(node: Node, source: str, target: str) -> bool:
    """Whether a node copies from one type of device to another."""
    copied: Any = node.args[0] if node.target is _aten._to_copy.default else None
    return copied is not None and (copied.meta["val"].device.type, node.meta["val"].device.type) == (source, target)


def _to_host(node: Node, *, static: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A non-blocking copy into page-locked memory: readers wait for it, and so does the end of the run."""
    meta = node.meta["val"]
    shape, stride, dtype = tuple(meta.shape), meta.stride(), meta.dtype

    def fresh() -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)

    same_memory = fresh() if static else None

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() != stride or tensor.dtype != dtype:  # or the copy would go through ordinary host memory
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device).copy_(tensor)
        return (fresh() if same_memory is None else same_memory).copy_(tensor, non_blocking=True)

    return to_host


def peer_source(step: TracedStep) -> torch.device | None:
    """The source GPU of a copy from one GPU to another."""
    if step.task.kind != "copy":
        return None
    source: Any = step.node.all_input_nodes[-1]
    return source.meta["val"].device  # type: ignore[no-any-return]


def on_cpu(step: TracedStep) -> bool:
    return step.task.device == "cpu"


class _Marks:
    """Writes the lines about streams: which one is current, what it waits for, which events others wait for."""

    def __init__(self, trace: Trace, schedule: Schedule, streams: Sequence[torch.cuda.Stream], code: Code) -> None:
        self._trace, self._schedule, self._code = trace, schedule, code
        self._waited = {other for others in schedule.waits.values() for other in others}
        self._used = gpu_lanes(trace, schedule)
        self._names = {lane: code.name(streams[lane]) for lane in self._used}
        self._set = code.name(torch.cuda.set_stream)
        self._events: dict[int, str] = {}
        self._first = self._current = self._used[0] if self._used else 0
        self._from_host: dict[int, str] = {}  # each lane's last copy that the host waits for
        self._beside: dict[tuple[int, torch.device], str] = {}  # streams for copies from one GPU to another

    def begin(self) -> None:
        """All lanes start after the first one, which starts after the caller's stream."""
        if len(self._used) > 1:
            start = self._code.name(torch.cuda.Event())
            self._code.lines.append(f"{start}.record({self._names[self._first]})")
            for lane in self._used[1:]:
                self._code.lines.append(f"{self._names[lane]}.wait_event({start})")

    def before(self, task: int) -> None:
        host = on_cpu(self._trace.steps[task])
        lane = self._schedule.lane_of[task]
        for other in self._schedule.waits.get(task, ()):
            if on_cpu(self._trace.steps[other]):
                continue  # synchronous: finished when issued
            if host:
                self._code.lines.append(f"{self._events[other]}.synchronize()")
            else:
                self._code.lines.append(f"{self._names[lane]}.wait_event({self._events[other]})")
        if host:
            return
        if (source := peer_source(self._trace.steps[task])) is not None:
            # PyTorch copies on the source device's current stream, and orders that with the lane, a stream of the
            # target. A separate stream on the source keeps the copy out of the queue of other work.
            key = (lane, source)
            if key not in self._beside:
                self._beside[key] = self._code.name(torch.cuda.Stream(source))
            self._code.lines.append(f"{self._set}({self._beside[key]})")
            self._current = -1
        if lane != self._current:
            self._code.lines.append(f"{self._set}({self._names[lane]})")
            self._current = lane

    def stamp(self, task: int) -> None:
        """Called before and after a task that is timed."""
        stamps = self._code.stamps
        if stamps is None:
            return
        if on_cpu(self._trace.steps[task]):
            times = self._code.name(stamps.setdefault(task, []))
            self._code.lines.append(f"{times}.append({self._code.name(time.perf_counter)}())")
            return
        event = torch.cuda.Event(enable_timing=True)
        stamps.setdefault(task, []).append(event)
        self._code.lines.append(f"{self._code.name(event)}.record({self._names[self._schedule.lane_of[task]]})")

    def after(self, task: int) -> None:
        step = self._trace.steps[task]
        if on_cpu(step):
            return
        # The host waits for such a copy, as in plain execution, because the caller may overwrite its source next.
        blocking = step.task.kind == "copy in" and not step.node.kwargs.get("non_blocking")
        if task in self._waited or (blocking and not self._code.static):
            self._events[task] = self._code.name(torch.cuda.Event())
            self._code.lines.append(f"{self._events[task]}.record({self._names[self._schedule.lane_of[task]]})")
        if blocking and task in self._events:
            self._from_host[self._schedule.lane_of[task]] = self._events[task]

    def end(self) -> None:
        """The first lane waits for all others, so work issued after the run starts after all of it."""
        for lane in self._used[1:]:
            done = self._code.name(torch.cuda.Event())
            self._code.lines.append(f"{done}.record({self._names[lane]})")
            self._code.lines.append(f"{self._names[self._first]}.wait_event({done})")
        if self._current != self._first:
            self._code.lines.append(f"{self._set}({self._names[self._first]})")
        for event in self._from_host.values() if not self._code.static else ():
            self._code.lines.append(f"{event}.synchronize()")


def gpu_lanes(trace: Trace, schedule: Schedule) -> list[int]:
    """The lanes that are streams; the others are the issuing thread."""
    return sorted({schedule.lane_of[task] for task, step in enumerate(trace.steps) if not on_cpu(step)})


# When memory is freed


def _releases(trace: Trace, schedule: Schedule) -> dict[int, list[str]]:
    """The names that may be deleted after each task: those whose users are all known, on their stream, to be done."""
    names: dict[str, frozenset[int]] = {}
    for step in trace.steps:
        memories = frozenset().union(*(trace.storages[node] for node in step.nodes))
        # The name of a tuple of results, or of a view, keeps the memory alive.
        names.update((node.name, memories) for node in step.nodes)
    points = release_points(trace, schedule)
    place = {task: number for number, task in enumerate(schedule.order)}
    released_after: dict[int, list[str]] = {}
    for name, memories in names.items():
        if memories and all(memory in points for memory in memories):
            last = max((points[memory] for memory in memories), key=place.__getitem__)
            released_after.setdefault(last, []).append(name)
    return released_after


def release_points(trace: Trace, schedule: Schedule) -> dict[int, int]:
    """For each memory, the task after which it may be reused; memories that live to the end are omitted."""
    callers = trace.callers_memories() | trace.memories_of(trace.outputs)
    makers: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    held: set[int] = set()
    for task, step in enumerate(trace.steps):
        for memory in step.task.writes | step.task.reads:
            users.setdefault(memory, set()).add(task)
        for memory in step.task.writes:
            makers.setdefault(memory, task)
        for node in step.nodes:
            held |= trace.storages[node]
    return points(
        schedule, {m: ({schedule.lane_of[makers[m]]}, users[m]) for m in makers if m in held and m not in callers}
    )


def points(schedule: Schedule, wanted: Mapping[_Key, tuple[Iterable[int], Iterable[int]]]) -> dict[_Key, int]:
    """By key, the first task of one of these lanes at which all of these users are known to be done; none: omitted.

    ``wanted`` has the lanes and the users. A lane's clock says how far each other lane is known to have come, and it
    only goes forward: so the place is found by bisection.
    """
    count = max(schedule.lane_of, default=-1) + 1
    clocks = Clocks(count)
    tasks: list[list[int]] = [[] for _ in range(count)]  # of each lane
    known: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(count)]  # of each other lane, at these
    waited = {other for others in schedule.waits.values() for other in others}
    for task in schedule.order:
        lane = schedule.lane_of[task]
        for other in schedule.waits.get(task, ()):
            clocks.wait(lane, other)
        clocks.issue(lane, task, waited_for=task in waited)
        tasks[lane].append(task)
        for other in range(count):
            known[lane][other].append(clocks.known_position(lane, other))
    number = {task: place for place, task in enumerate(schedule.order)}
    found: dict[_Key, int] = {}
    for key, (lanes, users) in wanted.items():
        last: dict[int, int] = {}  # the place of the last user, on each lane
        for user in users:
            last[schedule.lane_of[user]] = max(last.get(schedule.lane_of[user], 0), clocks.place[user])
        there: list[int] = []
        for lane in lanes:
            place = max(bisect_left(known[lane][other], place) for other, place in last.items())
            there += tasks[lane][place : place + 1]
        if there:
            found[key] = min(there, key=number.__getitem__)
    return found
