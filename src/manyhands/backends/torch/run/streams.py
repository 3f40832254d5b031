"""Runs the code of lanes on CUDA streams, issued anew on every call; and says why a trace cannot be one CUDA graph.

A CUDA graph (:mod:`.cuda_graph`) takes no time on the host, but always uses the same memory. Issuing the operations
costs the host some microseconds each, and returns new results. That is better if much is copied to the host, and the
only way if the CPU computes in between or if numbers on the host are arguments of kernels.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace, is_check
from manyhands.backends.torch.run.codegen import Stamps, generate, gpu_lanes, on_cpu
from manyhands.schedule.lanes import Schedule

_MUCH = 16 << 20  # bytes to the host: above this, copying a graph's results on the host takes too long


def why_no_graph(trace: Trace) -> str | None:
    """Why the trace cannot, or should not, be captured in a CUDA graph."""
    to_host = 0
    if len(gpus := trace.gpus()) > 1:
        return f"no CUDA graph: it uses several GPUs ({', '.join(sorted(gpus))}), which are launched at every call"
    for step in trace.steps:
        if is_check(step.node):
            return f"no CUDA graph: {step.task.name} reads values on the host"
        if on_cpu(step):
            return f"no CUDA graph: {step.task.name} is computed on the CPU"
        if step.task.kind == "compute" and any(_on_host(source) for source in step.node.all_input_nodes):
            return f"no CUDA graph: {step.task.name} takes a number from the host, which a graph would freeze"
        if step.task.kind == "copy in" and any(source.op != "placeholder" for source in step.node.all_input_nodes):
            return f"no CUDA graph: {step.task.name} copies a tensor from outside, or computed, from the host"
        if step.task.kind == "copy out" and step.node.target is torch.ops.aten.copy_.default:
            return "no CUDA graph: copy_ writes to memory of the host, which may be elsewhere at the next call"
        if step.task.kind == "copy out":
            value = step.node.meta["val"]
            to_host += value.numel() * value.element_size()
    if to_host > _MUCH:
        return f"no CUDA graph: {to_host / 1e6:.0f} MB go to the host, and every call needs new memory for them"
    return None


def copies_or_computes_on_host(trace: Trace) -> bool:
    return any(on_cpu(step) or step.task.kind in ("copy in", "copy out") for step in trace.steps) or any(
        _on_host(source) for step in trace.steps for source in step.node.all_input_nodes
    )


def _on_host(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


Gpus = tuple[torch.device, ...]  # the GPUs that a function uses, in order; a run begins and ends on the first


@contextmanager
def as_traced(devices: Gpus, stream: torch.cuda.Stream) -> Iterator[None]:
    """Disables autocast and gradients, which are already in the trace; restores the streams of all devices."""
    before = [torch.cuda.current_stream(device) for device in devices]
    with (
        torch.cuda.device(devices[0]),
        torch.no_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
        torch.cuda.stream(stream),
    ):
        try:
            yield
        finally:
            for previous in before[1:]:
                torch.cuda.set_stream(previous)


def streams_of(schedule: Schedule, devices: Gpus) -> list[torch.cuda.Stream]:
    """A stream for each lane, on its device; streams of CPU lanes are not used."""
    named = {f"gpu:{device.index or 0}": device for device in devices}
    return [torch.cuda.Stream(named.get(lane.device, devices[0])) for lane in schedule.lanes]


class StreamRun:
    """A run that is issued anew on every call. Its results are fresh."""

    def __init__(self, trace: Trace, schedule: Schedule, devices: Gpus, stamps: Stamps | None = None) -> None:
        self._devices = devices
        self._streams = streams_of(schedule, devices)
        self._first = self._streams[next(iter(gpu_lanes(trace, schedule)), 0)]
        self._run = generate(trace, schedule, self._streams, stamps=stamps).build()
        self._waits = any(step.task.kind == "copy out" for step in trace.steps)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        current = [torch.cuda.current_stream(device) for device in self._devices]
        for stream in current:
            self._first.wait_stream(stream)
        with as_traced(self._devices, self._first):
            results: list[Any] = self._run(inputs)
        for stream in current:
            stream.wait_stream(self._first)
        if self._waits:
            self._first.synchronize()
        for result in results:
            # The result was allocated on a stream of the run; the caller frees it on their own stream.
            if isinstance(result, torch.Tensor) and result.device.type == "cuda":
                result.record_stream(torch.cuda.current_stream(result.device))
        return results


def timed_streams(
    trace: Trace, schedule: Schedule, inputs: Sequence[torch.Tensor], devices: Gpus
) -> list[tuple[float, float]]:
    """When each task of an issued run began and ended: by CUDA events around it, or by the host's clock."""
    stamps: Stamps = {}
    run = StreamRun(trace, schedule, devices, stamps)
    run.replay(inputs)  # warms up
    for times in stamps.values():
        if isinstance(times[0], float):
            times.clear()
    starts = {}
    for device in devices:
        torch.cuda.synchronize(device)
        starts[device] = torch.cuda.Event(enable_timing=True)
        starts[device].record(torch.cuda.current_stream(device))
    begin = time.perf_counter()
    run.replay(inputs)
    for device in devices:
        torch.cuda.synchronize(device)
    moments = []
    for task, step in enumerate(trace.steps):
        first, last = stamps[task]
        if on_cpu(step):
            moments.append((first - begin, last - begin))
        else:
            start = starts[_gpu(step.task.device, devices)]
            moments.append((start.elapsed_time(first) / 1e3, start.elapsed_time(last) / 1e3))
    return moments


def _gpu(name: str, devices: Gpus) -> torch.device:
    return next(device for device in devices if f"gpu:{device.index or 0}" == name)


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, device: torch.device, **how: Any) -> Iterator[None]:
    """Capture a CUDA graph. Other threads, such as data loaders, may allocate and copy during the capture.

    Whatever fails inside, nothing is being captured afterwards.
    """
    before = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **how):
            stream = torch.cuda.current_stream(device)
            try:
                yield
            finally:  # the code inside may have failed on another stream, and a capture ends only where it began
                torch.cuda.set_stream(stream)
    except BaseException:
        torch.cuda.set_stream(before)  # PyTorch leaves the capture's stream only if it could end the capture
        compat.end_failed_capture(graph, device)
        reset_generator(device)
        raise


def reset_generator(device: torch.device) -> None:
    """Reset the GPU's random generator after a failed capture: PyTorch may still treat it as being captured.

    A capture that succeeds takes and returns the generator's state, so graphs captured earlier keep theirs. If no
    capture succeeds, the generator gets a copy of its state, which other graphs do not share.
    """
    try:
        with torch.cuda.device(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*CUDA Graph is empty.*")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                pass
    except RuntimeError:
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
