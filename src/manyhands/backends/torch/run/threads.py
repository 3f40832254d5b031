"""Runs a traced function's lanes on threads of the CPU.

The code of a run is generated, a function for each lane: its operations in the schedule's order, and gates where one
lane waits for another. The caller's thread runs the first lane, the others run on a pool of threads. PyTorch's threads
for its operations are divided among the lanes.

An example with two lanes: one computes a, the other one b, and the first one their product c. The code is

    def run(inputs, together):
        x, = inputs
        a = b = c = None
        def lane0(gates, stop):                   def lane1(gates, stop):
            nonlocal a, b, c                          nonlocal a, b, c
            a = mm(x, x)                              b = sin(x)
            gates[0].acquire()                        gates[0].release()
            if stop: raise Stopped
            c = mul(a, b)
            del a, b
        together(lane0, lane1)
        return [c]

A gate is a lock that starts closed. One lane opens it, and one lane passes it, which closes it for the next run. A
value is deleted where a lane knows that no task needs it any more.

When a task fails, its lane sets the stop flag and opens every gate; the other lanes stop at their next task.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.run.codegen import Code, Stamps, argument_text, call_text, function, points
from manyhands.backends.torch.virtual import VirtualTensor, inside, is_virtual, no_hooks
from manyhands.schedule.graph import Task
from manyhands.schedule.lanes import Schedule

_Lane = Callable[[Sequence[threading.Lock], Sequence[Any]], None]
_VALUES = 1 << 24  # the first number of a value: above a trace's handles, far below any address
_MOST = 1 << 16  # threads: a lane must never wait for a free one
# A child of os.fork has only the thread that forked, so it gets a new pool.
_pools: dict[int, ThreadPoolExecutor] = {}


class LaneStopped(Exception):
    """Another lane has failed; raised and caught only inside a run."""


def tasks(trace: Trace) -> list[Task]:
    """The trace's tasks, with an order between the task that makes a value and its users, whatever memory it is in.

    On a GPU one thread issues everything, and a value exists as soon as its task is issued. Here the Python object is
    passed from thread to thread. So it counts as a separate memory, and its order is planned and proved, too.
    """
    made_by = {node: number for number, step in enumerate(trace.steps) for node in step.nodes}
    with_values = []
    for number, step in enumerate(trace.steps):
        makers = {made_by.get(source, number) for node in step.nodes for source in node.all_input_nodes} - {number}
        old = step.task
        reads, writes = old.reads | {_VALUES + maker for maker in makers}, old.writes | {_VALUES + number}
        with_values.append(replace(old, reads=reads, writes=writes))
    return with_values


def in_order(schedule: Schedule) -> Schedule:
    """The same order on one lane, for the caller's thread alone."""
    return replace(schedule, lanes=schedule.lanes[:1], lane_of=(0,) * len(schedule.lane_of), waits={})


# Code


def _generate(trace: Trace, schedule: Schedule, stamps: Stamps | None) -> tuple[Callable[..., list[Any]], int]:
    """The code of a run, and how many gates it has."""
    code = Code(stamps=stamps)
    lanes: dict[int, list[str]] = {lane: [] for lane in sorted({*schedule.lane_of})}
    waits = [(other, task) for task, others in schedule.waits.items() for other in others]
    across = [pair for pair in waits if schedule.lane_of[pair[0]] != schedule.lane_of[pair[1]]]
    gates = {pair: f"gates[{number}]" for number, pair in enumerate(across)}
    opened: dict[int, list[str]] = {}
    for (other, _), gate in gates.items():
        opened.setdefault(other, []).append(f"{gate}.release()")
    stopped, clock = code.name(LaneStopped), code.name(time.perf_counter)
    gone = _last_uses(trace, schedule)
    for task in schedule.order:
        lines, stamp = lanes[schedule.lane_of[task]], []
        if stamps is not None:
            stamp = [f"{code.name(stamps.setdefault(task, []))}.append({clock}())"]
        lines += [f"{gates[other, task]}.acquire()" for other in schedule.waits.get(task, ()) if (other, task) in gates]
        lines += [f"if stop: raise {stopped}"] if len(lanes) > 1 else []
        lines += [*stamp, *(f"{node.name} = {call_text(node, code)}" for node in trace.steps[task].nodes), *stamp]
        lines += opened.get(task, ())
        lines += [f"del {', '.join(gone[task])}"] if task in gone else []
    source = ["def run(inputs, together):"]
    source += [f" {node.name} = inputs[{number}]" for number, node in enumerate(trace.inputs)]
    source += [f" {node.name} = {code.name(trace.constant(node))}" for node in trace.constants]
    if len(lanes) < 2:
        source += [f" {line}" for lines in lanes.values() for line in lines]
    else:
        values = [node.name for step in trace.steps for node in step.nodes]
        source += [f" {' = '.join(values)} = None"]
        for lane, lines in lanes.items():
            body = [f"nonlocal {', '.join(values)}", *lines]
            source += [f" def lane{lane}(gates, stop):", *(f"  {line}" for line in body)]
        source += [f" together({', '.join(f'lane{lane}' for lane in lanes)})"]
    source += [f" return [{', '.join(argument_text(value, code) for value in trace.outputs)}]"]
    return function("lanes", "\n".join(source), code.names), len(gates)


def _last_uses(trace: Trace, schedule: Schedule) -> dict[int, list[str]]:
    """The values to delete after each task: those that all tasks have used, as far as its lane knows."""
    users = {node: {task} for task, step in enumerate(trace.steps) for node in step.nodes}
    for task, step in enumerate(trace.steps):
        for source in (source for node in step.nodes for source in node.all_input_nodes if source in users):
            users[source].add(task)
    wanted = {
        node.name: ({schedule.lane_of[task] for task in tasks}, tasks)
        for node, tasks in users.items()
        if node not in trace.outputs
    }
    gone: dict[int, list[str]] = {}
    for name, task in points(schedule, wanted).items():
        gone.setdefault(task, []).append(name)
    return gone


# Runs


class ThreadRun:
    """A run of lanes on threads: ``threads`` in all, divided among the lanes."""

    def __init__(self, trace: Trace, schedule: Schedule, threads: int, stamps: Stamps | None = None) -> None:
        """``stamps`` receives the clock's seconds before and after every task."""
        self._trace, self._schedule = trace, schedule
        self.lanes = max(1, len({*schedule.lane_of}))
        self.threads = max(1, threads // self.lanes)
        self._run, self._gates = _generate(trace, schedule, stamps)
        self._spare: list[list[threading.Lock]] = []  # closed gates, for concurrent runs of several callers
        self._waits_at_end = any(step.task.device.startswith("gpu") for step in trace.steps)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        if self.lanes > 1 and not threading.main_thread().is_alive():  # the interpreter is ending
            return type(self)(self._trace, in_order(self._schedule), self.threads).replay(inputs)
        # The casts and the gradients are already in the trace: operations must not add them again.
        cast = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
        with cast, torch.no_grad(), operation_threads(self.threads):
            results = self._run(inputs, self._together)
        if self._waits_at_end:  # copies to the host may still run after they are issued
            torch.cuda.synchronize()
        return results

    def _together(self, *lanes: _Lane) -> None:
        try:
            gates = self._spare.pop()
        except IndexError:  # not checked first: another caller may take the last ones in between
            gates = [threading.Lock() for _ in range(self._gates)]
            for gate in gates:
                gate.acquire()
        stop: list[BaseException] = []

        def fail(error: BaseException) -> None:
            stop.append(error)  # the first error counts; later ones may be its consequences
            for gate in gates:
                with suppress(RuntimeError):
                    gate.release()

        inference = torch.is_inference_mode_enabled()  # a setting of each thread

        def work(lane: _Lane) -> None:
            try:
                with torch.inference_mode() if inference else nullcontext():
                    lane(gates, stop)
            except BaseException as error:
                fail(error)

        def elsewhere(lane: _Lane) -> None:
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
            work(lane)

        futures: list[Future[None]] = []
        try:
            for lane in lanes[1:]:
                futures.append(pool().submit(elsewhere, lane))
            work(lanes[0])
        except BaseException as error:  # an interrupt between the lines above
            fail(error)
        while True:
            try:
                wait(futures)
                break
            except KeyboardInterrupt as error:
                fail(error)
        if stop:
            failure = next((error for error in stop if isinstance(error, KeyboardInterrupt)), stop[0])
            stop.clear()  # avoids a cycle: the list would hold the error, whose traceback holds this frame
            try:
                raise failure
            finally:
                del failure
        self._spare.append(gates)


class VirtualRun(ThreadRun):
    """A run on the tensors inside virtual tensors; each virtual device is a lane. Its results are on these devices."""

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        with no_hooks():
            results = super().replay([inside(tensor) for tensor in inputs])
        devices = [value.meta["val"].device if isinstance(value, Node) else None for value in self._trace.outputs]
        return [
            VirtualTensor(result, device) if device is not None and is_virtual(device) else result
            for result, device in zip(results, devices, strict=True)
        ]


def timed_threads(trace: Trace, schedule: Schedule, inputs: Sequence[Any], threads: int) -> list[tuple[float, float]]:
    """When each task of a run on threads began and ended."""
    stamps: Stamps = {}
    run = ThreadRun(trace, schedule, threads, stamps)
    run.replay(inputs)  # wakes the workers
    for times in stamps.values():
        times.clear()
    begin = time.perf_counter()
    run.replay(inputs)
    return [(stamps[task][0] - begin, stamps[task][1] - begin) for task in range(len(trace.steps))]


# Threads


@functools.cache
def initialize_vector_math() -> None:
    """Call one vector function before threads do.

    Intel's vector math library, which PyTorch uses for ``sin``, ``exp`` and the like, chooses its kernels in its first
    call. If two threads make that call at once, one of them may run a less accurate kernel.
    """
    torch.exp(torch.zeros(1, device="cpu"))


def pool() -> ThreadPoolExecutor:
    """The threads of this process that run lanes; they are joined before the interpreter ends."""
    initialize_vector_math()
    if os.getpid() not in _pools:
        made = ThreadPoolExecutor(_MOST, "manyhands lane", functools.partial(compat.set_grad_enabled, False))
        return _pools.setdefault(os.getpid(), made)
    return _pools[os.getpid()]


@contextmanager
def operation_threads(wanted: int) -> Iterator[None]:
    """Use ``wanted`` threads for each operation that this thread calls."""
    before = torch.get_num_threads()
    if before != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)
