"""What the planner (:mod:`manyhands.parallel.planner`) asks PyTorch: facts about traces, runs, comparisons, times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from manyhands import machine
from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.capture.trace import Trace, meaningless_outputs
from manyhands.backends.torch.run import costs
from manyhands.backends.torch.run.copies import copy_all
from manyhands.backends.torch.run.streams import Gpus, timed_streams
from manyhands.backends.torch.run.threads import ThreadRun, VirtualRun, operation_threads, timed_threads
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import Schedule, one_lane
from manyhands.schedule.memory import Footprint

threads = torch.get_num_threads  # PyTorch's threads, which CPU lanes divide among themselves
Tensor = Any  # for the planner, which imports no framework
Run = Callable[[Sequence[Any]], list[Any]]  # the results of a graph for its tensors
_SHORT = 5e-3  # seconds
_NOISE = 1e-2  # of the largest result: the size of what is zero up to rounding, as the gradient of a cancelled bias

# What to write instead of several calls of one operation.
_BATCHED = {
    "mm": "one torch.bmm of stacked matrices",
    "addmm": "one torch.baddbmm of stacked matrices",
    "bmm": "one torch.bmm of joined batches",
    "convolution": "one convolution with groups, or torch.vmap",
    "_scaled_dot_product": "one attention over joined batches",
    "native_layer_norm": "torch.vmap over stacked tensors",
    "native_batch_norm": "torch.vmap over stacked tensors",
}


def device_of(trace: Trace) -> Gpus | None:
    """The GPUs that steps run on, perhaps besides the CPU; None if all steps run on the CPU."""
    devices = sorted(int(name.partition(":")[2]) for name in trace.gpus())
    return tuple(torch.device("cuda", number) for number in devices) or None


# Facts about a trace, without running it


def footprint(trace: Trace) -> Footprint:
    """The bytes of each memory, the memories of the inputs, and those of the results."""
    sizes: dict[int, int] = {}
    for node in trace.module.graph.nodes:
        # As in trace.py: a tensor from outside, and a view of it, has a negative number.
        outside = [memory for memory in trace.storages.get(node, ()) if memory < 0]
        known = trace.constant(node) if node.op == "get_attr" else node.meta.get("val")
        for value in compat.tensors_in(known):
            if value.layout is torch.strided:
                storage = value.untyped_storage()
                sizes[outside[0] if outside else compat.storage_id(storage)] = storage.nbytes()
    return Footprint(sizes, trace.callers_memories() & sizes.keys(), trace.memories_of(trace.outputs) & sizes.keys())


def written_values(trace: Trace, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments and the tensors from outside that the function writes to."""
    changed = [*(tensors[number] for number in trace.written_inputs()), *trace.written_constants()]
    return list({id(tensor): tensor for tensor in changed}.values())


def copied_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of arguments that a CUDA graph copies: all but parameters, which are read in place."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if type(tensor) is not torch.nn.Parameter)


def device_memory(devices: tuple[torch.device, ...] | None) -> int:
    """The total bytes of the smallest of these GPUs, or of the host."""
    if devices is None:
        return machine.host_memory().total
    return min(int(torch.cuda.get_device_properties(device).total_memory) for device in devices)


def batch_hint(trace: Trace, number: int) -> str | None:
    """What several such operations could be written as, if they can be batched; else None."""
    step = trace.steps[number]
    name = step.task.name
    computes = step.task.kind == "compute" and step.task.writes - step.task.reads
    if not computes or not compat.tensors_in(step.node.meta.get("val")):
        return None
    better = next((text for word, text in _BATCHED.items() if name.startswith(word)), None)
    if better is None:
        return None
    values = [value for source in step.node.all_input_nodes for value in compat.tensors_in(source.meta.get("val"))]
    shapes = " and ".join("x".join(map(str, value.shape)) for value in values if value.dim())
    return f"{name} {shapes} could be {better}: measure it"


# Runs


@contextmanager
def restore_after(trace: Trace, tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Trials inside leave no effects: written tensors and random states are restored.

    Yields a function that restores written tensors already before the end: a graph that advances a state, such as a
    position in its data, must not run past the end of the data in repeated trials.
    """
    saved = [(tensor, tensor.detach().clone()) for tensor in written_values(trace, tensors)]
    state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)

    try:
        yield put_back
    finally:
        put_back()
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def results_of(trace: Trace, tensors: Sequence[torch.Tensor], run: Run) -> list[Any]:
    """Copies of what a run gives and writes, for a comparison: plain tensors, and None for values without meaning."""
    with restore_after(trace, tensors):
        nothing = meaningless_outputs(trace)
        values = [*run(tensors), *written_values(trace, tensors)]
        return copy_all([None if number in nothing else virtual.inside(value) for number, value in enumerate(values)])


def round_tensors(tensors: Sequence[Any], by: float) -> list[Any]:
    """The tensors with each number a little closer to zero, by up to this share of it."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(tensor.device).manual_seed(0)
        noise = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        return tensor.detach() * (1 - by * noise).to(tensor.dtype)

    return [move(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]


def as_written(trace: Trace, threads: int | None = None) -> Run:
    """Runs a graph operation by operation, as it was captured, with this many threads for each (None: all)."""
    trace = trace.unsplit or trace
    if virtual.count():
        return VirtualRun(trace, one_lane(graph(trace.tasks)), threads or torch.get_num_threads()).replay

    def run(inputs: Sequence[torch.Tensor]) -> list[Any]:
        # The casts and the gradients are already in the graph: operations must not add them again.
        cast = compat.no_autocast() if compat.is_any_autocast_enabled() else nullcontext()
        with torch.no_grad(), cast, operation_threads(threads) if threads else nullcontext():
            return list(trace.module(*inputs))

    return run


def task_moments(trace: Trace, schedule: Schedule, devices: Gpus | None, threads: int) -> list[tuple[float, float]]:
    """Run a schedule with substitute arguments, so the caller's stay unchanged; when each task began and ended."""
    with torch.random.fork_rng([device.index for device in devices or ()]), virtual.no_hooks():
        inputs = costs.substitute_inputs(trace)
    with restore_after(trace, inputs), virtual.no_hooks():
        if devices is None:
            return timed_threads(trace, schedule, inputs, threads)
        return timed_streams(trace, schedule, inputs, devices)


def thread_run(trace: Trace, schedule: Schedule, count: int) -> ThreadRun:
    """The lanes of a schedule on threads of the CPU, ``count`` in all."""
    return (VirtualRun if virtual.count() else ThreadRun)(trace, schedule, count)


def equal(results: Sequence[Any], expected: Sequence[Any], *, is_compiled: bool = False) -> tuple[bool, float]:
    """Whether results are the same to the bit, and otherwise their largest relative difference.

    It is infinite for results of different forms, and for plain values (numbers, strings, None) that differ. NaN equals
    NaN. Compiled code rounds in other places: what is zero up to rounding is compared with the largest result then.
    """
    worst, same = 0.0, True
    noise = _NOISE * max(map(_size, compat.tensors_in(expected)), default=0.0) if is_compiled else 0.0
    for a, b in zip(results, expected, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or repr(a) != repr(b):
                return False, float("inf")
            continue
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False, float("inf")
        if torch.equal(a, b):
            continue
        if not torch.equal(a.isnan(), b.isnan()):
            return False, float("inf")
        a, b = (value.masked_fill(value.isnan(), 0) for value in (a, b))
        if not torch.equal(a, b):
            apart = float(torch.where(a == b, 0, _wide(a) - _wide(b)).norm())
            difference = apart / max(_size(b), noise, 1e-3)
            same, worst = False, max(worst, difference if math.isfinite(difference) else float("inf"))
    return same, worst


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _size(tensor: torch.Tensor) -> float:
    size = float(_wide(tensor).norm())
    return size if math.isfinite(size) else 0.0


def shared_memory(values: Sequence[Any]) -> set[tuple[int, int]]:
    """Pairs of results, by number, that share memory."""
    numbers = [(number, compat.memory_id(value)) for number, value in enumerate(values) if type(value) is torch.Tensor]
    return {(one, other) for (one, first), (other, second) in itertools.combinations(numbers, 2) if first == second}


def seconds(run: Callable[[], object], device: Gpus | None, put_back: Callable[[], None]) -> float:
    """The time of one call, including the device's work; ``put_back`` is called before.

    Threads of the previous run may still be spinning: of a short call only the second one counts.
    """
    for _ in range(2):
        put_back()
        spent = costs.seconds(run, device)
        if spent > _SHORT:
            break
    return spent
