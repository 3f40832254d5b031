"""Runs the code of lanes on a GPU: captured as one CUDA graph, then replayed.

A graph always uses the same memory: arguments are copied in, and results are copied out to memory that belongs to the
caller. The graph makes both copies itself if it can (:mod:`.copies`); otherwise they run before and after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.run.codegen import generate, gpu_lanes
from manyhands.backends.torch.run.copies import Copies, allocator, can_be_copied, copy_all, has_no_gaps, prepare
from manyhands.backends.torch.run.graph_nodes import instantiate
from manyhands.backends.torch.run.own_streams import own_streams, reserve_workspaces
from manyhands.backends.torch.run.streams import Gpus, as_traced, capture_graph
from manyhands.errors import CannotCompile
from manyhands.schedule.lanes import Schedule

# Operations that may call cuBLAS.
_MULTIPLIES = re.compile(r"mm|mv|matmul|linear|dot|attention|transformer|lstm|gru|rnn|linalg|solve|cholesky|manyhands")


class NoMemoryForResults(torch.OutOfMemoryError):
    """Raised by a replay before anything has run: the call can be made in another way."""


@dataclass(frozen=True)
class _Captured:
    """A graph with its results, and its copies, whose addresses are set before a replay."""

    graph: torch.cuda.CUDAGraph
    outputs: list[Any]
    copies_in: Copies | None
    copies_out: Copies | None


class GraphRun:
    """A run captured in one CUDA graph. Parameters are read in place, other arguments are copied in.

    Results belong to the caller. With ``reuse_outputs`` they belong to the graph, and the next replay overwrites them.
    """

    def __init__(
        self,
        trace: Trace,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        devices: Gpus,
        *,
        reuse_outputs: bool = False,
    ) -> None:
        self._devices, self._device = devices, devices[0]
        self._static = [_static(tensor) for tensor in inputs]
        self._written = trace.written_inputs()
        # The graph holds addresses: keep that memory alive, whatever happens to the tensors.
        self._constants = [value.detach() for value in trace.constant_values()]
        self._changed = [value for value in trace.written_constants() if not value.is_inference()]
        streams = own_streams(self._device, len(schedule.lanes))
        multiplying = [streams[lane] for lane in _lanes_with_products(trace, schedule)]
        reserve_workspaces(multiplying, self._device, gradients=False)
        self._first = streams[next(iter(gpu_lanes(trace, schedule)), 0)]
        self._issue = generate(trace, schedule, streams, static=True).build()
        self._from_host = any(step.task.kind == "copy in" for step in trace.steps)
        self._to_host = any(step.task.kind == "copy out" for step in trace.steps)
        self._over = torch.cuda.Event()
        self._stream = torch.cuda.current_stream(self._device)  # of the last replay
        self._moving: list[int] = []  # arguments that the graph copies in; the next line: those copied before it
        self._before: list[int] = []
        self._fresh: Callable[[], list[torch.Tensor]] | None = None  # memory that the graph copies results to
        self._keeps = reuse_outputs  # its results in its memory; otherwise they are copied, by the graph or after it
        self._prepare_copies(inputs, self._warm_up())
        try:
            self._graph = self._capture(self._static, self._moving)
        except CannotCompile:  # the copies cannot be identified in the graph
            self._before, self._moving, self._fresh = [*range(len(inputs))], [], None
            self._graph = self._capture(self._static, self._moving)
        self._results = {*map(compat.memory_id, compat.tensors_in(self._graph.outputs))}  # the memories of results
        # A parameter is at the address that the graph has: otherwise the call would have another plan.
        fixed = {number for number, tensor in enumerate(inputs) if type(tensor) is torch.nn.Parameter}
        self._before = [number for number in self._before if number not in fixed]
        self._back = [number for number in self._written if number not in fixed]

    def _warm_up(self) -> list[Any]:
        """Results of a first run, which initialises libraries and allocates their workspaces on every stream."""
        self._first.wait_stream(self._stream)
        with as_traced(self._devices, self._first):
            results: list[Any] = self._issue(self._static)
        self._stream.wait_stream(self._first)
        torch.cuda.synchronize(self._device)
        return results

    def _prepare_copies(self, inputs: Sequence[torch.Tensor], results: list[Any]) -> None:
        """Decide what the graph copies itself, and compile the kernels for it."""
        moving = [n for n, tensor in enumerate(inputs) if tensor.is_cuda and type(tensor) is not torch.nn.Parameter]
        self._moving = moving if self._can_copy([inputs[number] for number in moving]) else []
        self._before = sorted({*range(len(inputs))} - {*self._moving})
        if self._keeps or not all(type(result) is torch.Tensor for result in results):
            return
        if len({*map(compat.memory_id, results)}) < len(results):  # results that share memory stay so
            return
        dense = [_without_gaps(result) for result in results]
        if self._can_copy(dense):
            self._fresh = allocator(dense)

    def _can_copy(self, tensors: Sequence[torch.Tensor]) -> bool:
        if not can_be_copied(tensors, self._device):
            return False
        try:
            prepare(len(tensors), self._device)
        except CannotCompile:  # no NVRTC, an old GPU: PyTorch copies before and after the graph
            return False
        return True

    def _capture(self, inputs: Sequence[torch.Tensor], moving: Sequence[int]) -> _Captured:
        """The run as a graph; ``moving`` are the numbers of the inputs that it copies in."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        copies_in = Copies("copy_in", [inputs[number] for number in moving], self._device) if moving else None
        copies_out = None
        capture = capture_graph(graph, self._device, stream=self._first)
        with as_traced(self._devices, self._first), capture:
            if copies_in is not None:
                copies_in.launch()
            outputs: list[Any] = self._issue(inputs)
            if self._fresh is not None:
                copies_out = Copies("copy_out", [*map(_without_gaps, outputs)], self._device)
                copies_out.launch()
        instantiate(graph, self._device)
        with torch.cuda.device(self._device):
            for copies in (copies_in, copies_out):
                if copies is not None:
                    copies.find(graph)
        return _Captured(graph, outputs, copies_in, copies_out)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        try:
            fresh = None if self._fresh is None else self._fresh()
        except torch.OutOfMemoryError as error:
            raise NoMemoryForResults(str(error)) from None
        raw = compat.raw_stream(self._device.index)  # asking for the stream object takes long
        if raw != self._stream.cuda_stream:  # the last replay, or the copies of its results, may still run there
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._stream)
            self._stream = stream
        self._copy_in(inputs)
        if fresh is not None:
            self._graph.copies_out.retarget(fresh)  # type: ignore[union-attr]
        self._graph.graph.replay()
        self._copy_back(inputs)
        if self._changed or self._written:
            changed = [*self._changed, *(inputs[number] for number in self._written)]
            increment_version(changed)  # as eager writes do: a later backward pass must notice them
        if self._from_host:
            self._over.record(self._stream)
        if self._to_host:
            self._stream.synchronize()
        if fresh is not None:
            return fresh
        return self._graph.outputs if self._keeps else copy_all(self._graph.outputs)

    def _copy_in(self, inputs: Sequence[torch.Tensor]) -> None:
        """The graph copies arguments on the GPU, if it can; arguments already at the graph's addresses are skipped."""
        if self._graph.copies_in is not None:
            self._graph.copies_in.retarget([inputs[number] for number in self._moving])
        into, source = [], []
        for number in self._before:
            static, tensor = self._static[number], inputs[number]
            if static.data_ptr() == tensor.data_ptr():
                continue
            if static.device.type == "cpu":
                self._over.synchronize()  # the last replay may still be reading it
                static.copy_(tensor.detach())
            else:
                into.append(static)
                source.append(tensor.detach())
        if into:
            compat.foreach_copy_(into, source)

    def _copy_back(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy what the graph has written to its copies of arguments back to the arguments."""
        for number in self._back:
            tensor = inputs[number]
            # If the argument is the last call's result, its memory now holds this call's result.
            if tensor.data_ptr() != self._static[number].data_ptr() and compat.memory_id(tensor) not in self._results:
                tensor.detach().copy_(self._static[number])


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers without gaps in memory, like results that belong to the caller."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or has_no_gaps(tensor):
        return tensor
    return torch.empty_like(tensor).copy_(tensor)


def _static(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter is the same tensor on every call, so it is read in place rather than copied."""
    if type(tensor) is torch.nn.Parameter:
        return tensor.detach()
    if tensor.device.type == "cpu":
        pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor.detach())
    return tensor.detach().clone()


def _lanes_with_products(trace: Trace, schedule: Schedule) -> list[int]:
    """The lanes that may call cuBLAS, which needs a workspace for each: 32 MB on a Hopper GPU."""
    if len(schedule.lanes) == 1:
        return [0]  # compiled code does not say whether it calls cuBLAS
    calls = zip(schedule.lane_of, trace.steps, strict=True)
    return sorted({lane for lane, step in calls if _MULTIPLIES.search(str(step.node.target))})
