"""Runs the code of lanes on a GPU: captured in one CUDA graph and replayed, or issued anew at every call.

A graph takes the host out of the way, but its memory is always the same: arguments are copied in, results stay until
the next replay. Issuing anew costs the host some microseconds an operation, and gives fresh results: better where much
goes to the host, and the only way where the CPU computes in between, or numbers on the host are arguments of kernels.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.fx import Node

from manyhands.backends.torch_lanes import Plan, Stamps, generate, gpu_lanes, on_cpu
from manyhands.backends.torch_trace import Trace

_LIKELY = 32  # calls in a row whose arguments are in the same places; more than those that a plan is tried with
_LITTLE = 1 / 100  # of the device's memory: results that may be there twice, once for each graph of a run
_MUCH = 16 << 20  # bytes to the host: beyond that a graph's results would be copied on the host for too long


def why_no_graph(trace: Trace) -> str | None:
    """Why the trace cannot be, or is better not, captured in a CUDA graph."""
    to_host = 0
    if len(gpus := trace.gpus()) > 1:
        return f"no CUDA graph: it uses several GPUs ({', '.join(sorted(gpus))}), which are issued at every call"
    for step in trace.steps:
        if on_cpu(step):
            return f"no CUDA graph: {step.task.name} is computed on the CPU"
        if step.task.kind == "compute" and any(_on_host(one) for one in step.node.all_input_nodes):
            return f"no CUDA graph: {step.task.name} takes a number from the host, which would stay as it was captured"
        if step.task.kind == "copy in" and any(one.op != "placeholder" for one in step.node.all_input_nodes):
            return f"no CUDA graph: {step.task.name} copies a tensor from outside, or computed, from the host"
        if step.task.kind == "copy out" and step.node.target is torch.ops.aten.copy_.default:
            return "no CUDA graph: copy_ writes to memory of the host, which may be elsewhere at the next call"
        if step.task.kind == "copy out":
            value = step.node.meta["val"]
            to_host += value.numel() * value.element_size()
    if to_host > _MUCH:
        return f"no CUDA graph: {to_host / 1e6:.0f} MB go to the host, into memory that every call needs afresh"
    return None


def copies_or_computes_on_host(trace: Trace) -> bool:
    return any(on_cpu(step) or step.task.kind in ("copy in", "copy out") for step in trace.steps) or any(
        _on_host(one) for step in trace.steps for one in step.node.all_input_nodes
    )


def _on_host(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


Gpus = tuple[torch.device, ...]  # those that a function uses, in order; the first one begins and ends a run


@contextmanager
def _as_traced(devices: Gpus, stream: torch.cuda.Stream) -> Iterator[None]:
    """The casts and the gradients are in the trace; the streams of all devices are put back."""
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
            for one in before[1:]:
                torch.cuda.set_stream(one)


def _streams(plan: Plan, devices: Gpus) -> list[torch.cuda.Stream]:
    """A stream for each lane, on its device; those of the CPU's lanes are not used."""
    named = {f"gpu:{device.index or 0}": device for device in devices}
    return [torch.cuda.Stream(named.get(name, devices[0])) for name in plan.devices]


class StreamRun:
    """A run that is issued anew at every call. Its results are fresh."""

    fresh = True

    def __init__(self, trace: Trace, plan: Plan, devices: Gpus, stamps: Stamps | None = None) -> None:
        self._devices = devices
        self._streams = _streams(plan, devices)
        self._first = self._streams[next(iter(gpu_lanes(trace, plan)), 0)]
        self._run = generate(trace, plan, self._streams, stamps=stamps).build()
        self._waits = any(step.task.kind == "copy out" for step in trace.steps)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        current = [torch.cuda.current_stream(device) for device in self._devices]
        for stream in current:
            self._first.wait_stream(stream)
        with _as_traced(self._devices, self._first):
            results: list[Any] = self._run(inputs)
        for stream in current:
            stream.wait_stream(self._first)
        if self._waits:
            self._first.synchronize()
        for result in results:
            # It was made on a stream of the run; the caller lets it go on their own.
            if isinstance(result, torch.Tensor) and result.device.type == "cuda":
                result.record_stream(torch.cuda.current_stream(result.device))
        return results


def timed_streams(trace: Trace, plan: Plan, inputs: Sequence[torch.Tensor], devices: Gpus) -> list[tuple[float, float]]:
    """When each task of a run, issued anew, began and ended: by CUDA events around it, or by the host's clock."""
    stamps: Stamps = {}
    run = StreamRun(trace, plan, devices, stamps)
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
    found = []
    for task, step in enumerate(trace.steps):
        first, last = stamps[task]
        if on_cpu(step):
            found.append((first - begin, last - begin))
        else:
            start = starts[_gpu(step.task.device, devices)]
            found.append((start.elapsed_time(first) / 1e3, start.elapsed_time(last) / 1e3))
    return found


def _gpu(name: str, devices: Gpus) -> torch.device:
    return next(device for device in devices if f"gpu:{device.index or 0}" == name)


class GraphRun:
    """A run captured in one CUDA graph. Parameters are read in place, other arguments are copied in.

    Where the arguments of many calls in a row lie in the same places, a second graph is captured that reads and writes
    them there: nothing is copied any more. It shares the first one's memory, but for results, which were there when it
    was captured: a result of either graph may be the next call's argument. It keeps no argument: it is only replayed
    for one that is in this place, whoever had the memory meanwhile.

    There is one memory for all replays: who calls it from several threads sees to it that one comes after the other.
    """

    fresh = False

    def __init__(self, trace: Trace, plan: Plan, inputs: Sequence[torch.Tensor], devices: Gpus) -> None:
        self._devices, self._device = devices, devices[0]
        self._static = [_static(tensor) for tensor in inputs]
        self._written = _written_inputs(trace)
        # The graph knows addresses: that memory is kept, whatever becomes of the tensors.
        self._kept = [value.detach() for value in trace.constant_values()]
        self._changed = _written_constants(trace)
        streams = _streams(plan, devices)
        self._first = first = streams[next(iter(gpu_lanes(trace, plan)), 0)]
        self._issue = generate(trace, plan, streams, static=True).build()
        current = torch.cuda.current_stream(self._device)
        first.wait_stream(current)
        with _as_traced(devices, first):
            self._issue(self._static)  # warms up libraries and, on every stream, their workspaces
        current.wait_stream(first)
        torch.cuda.synchronize(self._device)
        self.graph, self.outputs = self._captured(self._static)
        self._from_host = any(step.task.kind == "copy in" for step in trace.steps)
        self._to_host = any(step.task.kind == "copy out" for step in trace.steps)
        self._over = torch.cuda.Event()
        self._stream = current  # of the last replay
        self._last: list[int] = []  # where the arguments of the last call were, and for how many calls in a row
        self._times = 0
        self._places: list[int] | None = None
        self._in_place: tuple[torch.cuda.CUDAGraph, list[Any]] | None = None

    def _captured(self, inputs: Sequence[torch.Tensor], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating and copying meanwhile, as those that load data do.
        how: Any = {"stream": self._first, "pool": pool, "capture_error_mode": "thread_local"}
        try:
            with _as_traced(self._devices, self._first), torch.cuda.graph(graph, **how):
                outputs: list[Any] = self._issue(inputs)
        except BaseException:
            let_draw_again(self._device)
            raise
        return graph, outputs

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Run; what comes back is overwritten by the next replay."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)  # to ask for the stream itself takes long
        if raw != self._stream.cuda_stream:  # there the replay before may still run, or its results be copied
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._stream)
            self._stream = stream
        places = [given.data_ptr() for given in inputs]
        if places == self._places:
            assert self._in_place is not None
            graph, outputs = self._in_place
            graph.replay()
        else:
            self._replay_with_copies(inputs)
            outputs = self.outputs
            self._note(places, inputs)
        if changed := [*self._changed, *(inputs[number] for number in self._written)]:
            increment_version(changed)  # as writing operation by operation does: a later backward pass has to know
        if self._from_host:
            self._over.record(self._stream)
        if self._to_host:
            self._stream.synchronize()
        return outputs

    def _replay_with_copies(self, inputs: Sequence[torch.Tensor]) -> None:
        into, source = [], []
        for own, given in zip(self._static, inputs, strict=True):
            if own.data_ptr() != given.data_ptr():
                if own.device.type == "cpu":
                    self._over.synchronize()  # the replay before may still be reading it
                    own.copy_(given)
                else:
                    into.append(own)
                    source.append(given.detach())
        if into:
            torch._foreach_copy_(into, source)
        self.graph.replay()
        for number in self._written:
            given = inputs[number]
            # A result of the call before, given as argument, is this call's result now.
            if given.data_ptr() != self._static[number].data_ptr() and not _share(given, self.outputs):
                given.detach().copy_(self._static[number])

    def _note(self, places: list[int], inputs: Sequence[torch.Tensor]) -> None:
        """Count the calls whose arguments stay where they are; read them in place when that has become likely."""
        self._times = self._times + 1 if places == self._last else 0
        self._last = places
        if self._times != _LIKELY or self._in_place is not None or not self._pays(places, inputs):
            return
        with suppress(RuntimeError):  # nothing is lost: they are copied as before
            self._in_place = self._captured([tensor.detach() for tensor in inputs], self.graph.pool())
            self._places = places

    def _pays(self, places: list[int], inputs: Sequence[torch.Tensor]) -> bool:
        """Whether something is copied that need not be, and the results take little memory a second time."""
        if not all(tensor.is_cuda for tensor in inputs) or places == [own.data_ptr() for own in self._static]:
            return False
        again = sum(one.untyped_storage().nbytes() for one in self.outputs if isinstance(one, torch.Tensor))
        return again <= _LITTLE * torch.cuda.get_device_properties(self._device).total_memory


def let_draw_again(device: torch.device) -> None:
    """After a capture that failed: the GPU's random numbers may still be thought to be in it.

    A capture that succeeds takes and gives back the same numbers, so that graphs captured before keep theirs. Where
    there can be none, they get a state of their own, which other graphs know nothing of.
    """
    try:
        with torch.cuda.device(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*CUDA Graph is empty.*")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                pass
    except RuntimeError:
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())


def _share(one: torch.Tensor, others: Sequence[Any]) -> bool:
    memory = one.untyped_storage().data_ptr()
    return any(isinstance(other, torch.Tensor) and other.untyped_storage().data_ptr() == memory for other in others)


def _static(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter is the same tensor at every call: read in place rather than copied."""
    if type(tensor) is torch.nn.Parameter:
        return tensor.detach()
    if tensor.device.type == "cpu":
        kept = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor.detach())
    return tensor.detach().clone()


def _written_inputs(trace: Trace) -> list[int]:
    written = frozenset().union(*(step.task.writes for step in trace.steps))
    return [number for number, node in enumerate(trace.inputs) if trace.storages[node] & written]


def _written_constants(trace: Trace) -> list[torch.Tensor]:
    written = frozenset().union(*(step.task.writes for step in trace.steps))
    found = [getattr(trace.module, str(node.target)) for node in trace.constants if trace.storages[node] & written]
    return [value for value in found if isinstance(value, torch.Tensor) and not value.is_inference()]
