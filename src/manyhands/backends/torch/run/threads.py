"""Runs a traced function's lanes on threads of the CPU.

The code of a run is generated, a straight line for each lane: its operations in the schedule's order, and gates where
one lane waits for another. The caller's thread runs lane 0; workers that are kept from run to run run the others.
PyTorch's threads for its operations are divided among the lanes.

An example with two lanes: lane 0 computes a, lane 1 computes b, and lane 0 computes their product c. The code is

    def lane0(inputs, box, gates, stop):      def lane1(inputs, box, gates, stop):
        x, = inputs                               x, = inputs
        a = mm(x, x)                              b = sin(x)
        gates[0].acquire()                        box[0] = b
        if stop: raise Stopped                    gates[0].release()
        b = box[0]; box[0] = None                 del b
        c = mul(a, b)
        box[1] = c
        del a, b, c

A gate is a lock that starts closed. One lane opens it, and one lane passes it, which closes it for the next run. A
value is passed to another lane through a slot of the box, and its reader empties the slot. So no lane holds a value
after its last use there, and the memory is free once the last of these lanes has finished with it.

When a task fails, its lane sets the stop flag and opens every gate; the other lanes stop at their next task.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.run.codegen import Code, Plan, Stamps, argument_text, call_text, functions
from manyhands.backends.torch.run.thread_pool import Pool, closed_lock, pool
from manyhands.schedule.task import Task

_Lane = Callable[[Sequence[Any], Sequence[Any], Sequence[threading.Lock], Sequence[Any]], Any]
_VALUES = 1 << 24  # the first number of a value: above a trace's handles, far below any address


class Stopped(Exception):
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


def in_order(plan: Plan) -> Plan:
    """The same order on one lane, for the caller's thread alone."""
    return Plan(plan.devices[:1], [0] * len(plan.lane_of), plan.order, {})


# Code


@dataclass
class LaneCode:
    """The functions of a run's lanes, and the slots and gates between them."""

    lanes: list[_Lane]
    slots: int
    gates: int
    results: list[int | None]  # the slot of each output; None if no task computes it
    task_at: dict[int, str] = field(repr=False)  # the task of each source line, for errors

    @property
    def filename(self) -> str:
        return self.lanes[0].__code__.co_filename


class _Writer:
    """Writes the lanes' code: assigns slots to values, and finds the last use of each name."""

    def __init__(self, trace: Trace, plan: Plan, stamps: Stamps | None = None) -> None:
        self._trace, self._plan, self._code = trace, plan, Code(stamps=stamps)
        used = sorted(set(plan.lane_of))
        self._tasks = [[task for task in plan.order if plan.lane_of[task] == lane] for lane in used] or [[]]
        number = {lane: place for place, lane in enumerate(used)}
        self._lane_of = [number[lane] for lane in plan.lane_of]
        self._made_by = {node: task for task, step in enumerate(trace.steps) for node in step.nodes}
        self._constants = {node: trace.constant(node) for node in trace.constants}
        self._slots: dict[tuple[Node, int], int] = {}  # by value and the lane that reads it (-1: the caller)
        self._slots_of: dict[Node, list[int]] = {}
        self._gates: dict[tuple[int, int], int] = {}
        self._opened: dict[int, list[int]] = {}
        for task, others in plan.waits.items():
            for other in others:
                if self._lane_of[other] != self._lane_of[task]:
                    self._opened.setdefault(other, []).append(len(self._gates))
                    self._gates[other, task] = len(self._gates)
        self._task_at: dict[int, str] = {}

    def write(self) -> LaneCode:
        alone = len(self._tasks) == 1
        results = [
            self._slot(value, -1) if isinstance(value, Node) and value in self._made_by and not alone else None
            for value in self._trace.outputs
        ]
        for task, lane in enumerate(self._lane_of):
            for source in self._sources(task):
                if self._lane_of[self._made_by.get(source, task)] != lane:
                    self._slot(source, lane)
        stopped = self._code.name(Stopped)
        for lane in range(len(self._tasks)):
            self._lane(lane, stopped)
        lanes = functions("lanes", "\n".join(self._code.lines), self._code.names)
        return LaneCode(lanes, len(self._slots), len(self._gates), results, self._task_at)

    def _slot(self, node: Node, lane: int) -> int:
        if (node, lane) not in self._slots:
            self._slots_of.setdefault(node, []).append(len(self._slots))
            self._slots[node, lane] = len(self._slots)
        return self._slots[node, lane]

    def _lane(self, lane: int, stopped: str) -> None:
        lines = self._code.lines
        lines.append(f"def lane{lane}(inputs, box, gates, stop):")
        used = {source for task in self._tasks[lane] for source in self._sources(task)}
        returned: set[Any] = set(self._trace.outputs) if len(self._tasks) == 1 else set()
        used |= returned
        for place, node in enumerate(self._trace.inputs):
            if node in used:
                lines.append(f"    {node.name} = inputs[{place}]")
        for node, value in self._constants.items():
            if node in used:
                lines.append(f"    {node.name} = {self._code.name(value)}")
        last = self._last_uses(lane)
        taken: set[Node] = set()
        for task in self._tasks[lane]:
            for other in self._plan.waits.get(task, ()):
                if (other, task) in self._gates:
                    lines.append(f"    gates[{self._gates[other, task]}].acquire()")
            if len(self._tasks) > 1:
                lines.append(f"    if stop: raise {stopped}")
            self._take(task, lane, taken)
            self._stamp(task)
            for node in self._trace.steps[task].nodes:
                lines.append(f"    {node.name} = {call_text(node, self._code)}")
                self._task_at[len(lines)] = f"{self._trace.steps[task].task.name} (task {task}, lane {lane})"
            self._stamp(task)
            self._give(task)
            if names := [node.name for node in last.get(task, ()) if node not in returned]:
                lines.append(f"    del {', '.join(names)}")
        if len(self._tasks) == 1:
            results = ", ".join(argument_text(value, self._code) for value in self._trace.outputs)
            lines.append(f"    return [{results}]")

    def _stamp(self, task: int) -> None:
        if self._code.stamps is not None:
            times = self._code.name(self._code.stamps.setdefault(task, []))
            self._code.lines.append(f"    {times}.append({self._code.name(time.perf_counter)}())")

    def _sources(self, task: int) -> Iterator[Node]:
        for node in self._trace.steps[task].nodes:
            yield from node.all_input_nodes

    def _take(self, task: int, lane: int, taken: set[Node]) -> None:
        for source in dict.fromkeys(self._sources(task)):
            slot = self._slots.get((source, lane))
            if slot is not None and source not in taken:
                taken.add(source)
                self._code.lines.append(f"    {source.name} = box[{slot}]; box[{slot}] = None")

    def _give(self, task: int) -> None:
        for node in self._trace.steps[task].nodes:
            for slot in self._slots_of.get(node, ()):
                self._code.lines.append(f"    box[{slot}] = {node.name}")
        for gate in self._opened.get(task, ()):
            self._code.lines.append(f"    gates[{gate}].release()")

    def _last_uses(self, lane: int) -> dict[int, list[Node]]:
        """For each task of a lane, the names that the lane does not need after it."""
        last: dict[Node, int] = {}
        for task in self._tasks[lane]:
            for node in [*self._trace.steps[task].nodes, *self._sources(task)]:
                if node in self._made_by:
                    last[node] = task
        by_task: dict[int, list[Node]] = {}
        for node, task in last.items():
            by_task.setdefault(task, []).append(node)
        return by_task


# Runs


class ThreadRun:
    """A run of lanes on threads: ``threads`` in all, divided among the lanes."""

    concurrent = True  # every replay returns new results

    def __init__(self, trace: Trace, plan: Plan, threads: int, stamps: Stamps | None = None) -> None:
        """``stamps`` receives the clock's seconds before and after every task."""
        self._trace, self._plan = trace, plan
        self._code = _Writer(trace, plan, stamps).write()
        self.lanes = len(self._code.lanes)
        self.threads = max(1, threads // self.lanes)
        self._spare: list[list[threading.Lock]] = []  # closed gates, for concurrent runs of several callers
        self._waits_at_end = any(step.task.device.startswith("gpu") for step in trace.steps)
        self._inputs = {node: place for place, node in enumerate(trace.inputs)}

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        if self.lanes > 1 and (workers := pool()).closed:  # the interpreter is ending
            return ThreadRun(self._trace, in_order(self._plan), self.threads).replay(inputs)
        # The casts and the gradients are already in the trace: operations must not add them again.
        recorded, before = torch.is_grad_enabled(), torch.get_num_threads()
        cast = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
        box: list[Any] = []
        with cast:
            if before != self.threads:
                torch.set_num_threads(self.threads)
            compat.set_grad_enabled(False)
            try:
                if self.lanes == 1:
                    return self._alone(inputs)
                box = [None] * self._code.slots
                self._together(inputs, box, workers)
            finally:
                compat.set_grad_enabled(recorded)
                if before != self.threads:
                    torch.set_num_threads(before)
        return [
            box[slot] if slot is not None else self._untouched(value, inputs)
            for slot, value in zip(self._code.results, self._trace.outputs, strict=True)
        ]

    def _untouched(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """An output that no task computes: an argument, a constant of the trace, or a plain value."""
        if not isinstance(value, Node):
            return value
        return inputs[self._inputs[value]] if value in self._inputs else self._trace.constant(value)

    def _alone(self, inputs: Sequence[Any]) -> list[Any]:
        try:
            results: list[Any] = self._code.lanes[0](inputs, (), (), ())
        except Exception as error:
            self._explain(error)
            raise
        if self._waits_at_end:  # copies to the host may still run after they are issued
            torch.cuda.synchronize()
        return results

    def _together(self, inputs: Sequence[Any], box: list[Any], thread_pool: Pool) -> None:
        try:
            gates = self._spare.pop()
        except IndexError:  # not checked first: another caller may take the last ones in between
            gates = [closed_lock() for _ in range(self._code.gates)]
        stop: list[BaseException] = []
        inference = torch.is_inference_mode_enabled()  # a setting of each thread

        def done_by(lane: _Lane) -> None:
            try:
                with torch.inference_mode() if inference else nullcontext():
                    lane(inputs, box, gates, stop)
            except BaseException as error:
                stop.append(error)  # the first error counts; later ones may be its consequences
                for gate in gates:
                    with suppress(RuntimeError):
                        gate.release()

        workers = thread_pool.borrow(self.lanes - 1)
        interrupt: BaseException | None = None
        try:
            for worker, lane in zip(workers, self._code.lanes[1:], strict=True):
                worker.give(lambda lane=lane: done_by(lane), self.threads)  # type: ignore[misc]
            done_by(self._code.lanes[0])
        except BaseException as error:  # an interrupt between the lines above
            interrupt = error
            done_by(_failing)
        for worker in workers:
            interrupt = worker.wait() or interrupt
        thread_pool.give_back(workers)
        if interrupt is not None:
            raise interrupt
        if stop:
            failure = next((failed for failed in stop if isinstance(failed, KeyboardInterrupt)), stop[0])
            stop.clear()  # avoids a cycle: the list would hold the error, whose traceback holds this frame
            try:
                raise self._explain(failure)
            finally:
                del failure
        self._spare.append(gates)

    def _explain(self, error: BaseException) -> BaseException:
        """Add to the error the task in which it happened."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._code.filename:
                where = self._code.task_at.get(trace.tb_lineno)
                if where is not None:
                    error.add_note(f"in {where}")
            trace = trace.tb_next
        return error


def _failing(*_: Any) -> None:
    raise Stopped


def timed_threads(trace: Trace, plan: Plan, inputs: Sequence[Any], threads: int) -> list[tuple[float, float]]:
    """When each task of a run on threads began and ended."""
    stamps: Stamps = {}
    run = ThreadRun(trace, plan, threads, stamps)
    run.replay(inputs)  # wakes the workers
    for times in stamps.values():
        times.clear()
    begin = time.perf_counter()
    run.replay(inputs)
    return [(stamps[task][0] - begin, stamps[task][1] - begin) for task in range(len(trace.steps))]
