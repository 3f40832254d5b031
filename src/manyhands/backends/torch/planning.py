"""PyTorch for the planner (:mod:`manyhands.parallel.function`): signatures, traces, costs, runs and their times.

The module follows :class:`manyhands.backends.planning.Planning`; names that it only imports are part of that, too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from manyhands.backends.exactness import Verdict
from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.addresses import shown_by
from manyhands.backends.torch.capture.call import Call, call, trace, with_varied_numbers
from manyhands.backends.torch.capture.facts import (
    batch_hint,
    copied_bytes,
    device_memory,
    footprint,
    mixing,
    written_memories,
    written_values,
)
from manyhands.backends.torch.capture.fast_match import recogniser
from manyhands.backends.torch.capture.results import opened, together
from manyhands.backends.torch.capture.trace import Trace, is_check, meaningless_outputs
from manyhands.backends.torch.compat import tree_flatten
from manyhands.backends.torch.dynamo.pieces import has_pieces, in_pieces, timed_call
from manyhands.backends.torch.guards.by_dynamo import guards
from manyhands.backends.torch.passes.regions import fuse, fuse_whole
from manyhands.backends.torch.run import costs, float64
from manyhands.backends.torch.run import threads as torch_threads
from manyhands.backends.torch.run.codegen import Plan, plan_of, release_points
from manyhands.backends.torch.run.costs import cost_keys, estimated, hardware, measured, rates, tasks
from manyhands.backends.torch.run.cuda_graph import GraphRun, trial_calls
from manyhands.backends.torch.run.result_copies import copied
from manyhands.backends.torch.run.streams import (
    Gpus,
    StreamRun,
    copies_or_computes_on_host,
    timed_streams,
    why_no_graph,
)
from manyhands.backends.torch.run.thread_pool import operation_threads
from manyhands.backends.torch.run.threads import ThreadRun

name = "torch"
mode = torch.is_grad_enabled
threads = torch.get_num_threads  # PyTorch's threads, which CPU lanes divide among themselves
# Runs a call, given its tensors and its original arguments.
Run = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any]
_REPEATS = 20
_LONG = 0.5  # seconds: calls this long need no warm-up and few repetitions
_ENOUGH = (4, 4 * _LONG), (7, 0.25)  # calls that took so many seconds in all: no more are timed


def device_of(call: Call, trace: Trace) -> Gpus | None:
    """The GPUs that steps run on, perhaps besides the CPU; None if all steps run on the CPU."""
    devices = sorted(int(name.partition(":")[2]) for name in trace.gpus())
    return tuple(torch.device("cuda", number) for number in devices) or None


def unsplit(trace: Trace) -> Trace | None:
    return trace.unsplit


# Runs


@contextmanager
def untouched(trace: Trace, tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Trials inside leave no effects: written tensors and random states are restored, and the calls are not counted.

    Yields a function that restores written tensors already before the end: a function that advances a state, such as a
    position in its data, must not run past the end of the data in repeated trials.
    """
    saved = [(tensor, tensor.detach().clone()) for tensor in written_values(trace, tensors)]
    gradients = [(tensor, tensor.grad) for tensor, _ in trace.gradients]
    state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)
        for tensor, gradient in gradients:
            tensor.grad = gradient

    try:
        with trial_calls():
            yield put_back
    finally:
        put_back()
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def expected(trace: Trace, call: Call, plainly: Run) -> list[Any]:
    """The results of plain execution, its gradients, and the tensors that it writes to."""
    with untouched(trace, call.tensors):
        results = tree_flatten(opened(plainly(*call.run_arguments)))[0]
        gradients = [tensor.grad for tensor, there in trace.gradients if there]
        return _compared(trace, [*results, *gradients, *written_values(trace, call.tensors)])


def observed(trace: Trace, call: Call, run: Any) -> list[Any]:
    """The same for a run."""
    with untouched(trace, call.tensors):
        return _compared(trace, [*run.replay(call.tensors), *written_values(trace, call.tensors)])


def exact(trace: Trace, call: Call) -> list[Any]:
    """The same in float64, for a trace with compiled regions; raises :class:`CannotBeExact` if that is impossible."""
    assert trace.as_written is not None
    return float64.exact(trace.as_written, call.tensors, written_values(trace, call.tensors))


def verdict(
    trace: Trace, call: Call, candidate: Sequence[Any], plain: Sequence[Any], exactly: Sequence[Any]
) -> Verdict:
    """How far a run and plain execution are from exact results, each as returned by ``observed`` and ``expected``.

    Call it while the tensors of the call have their values from before it.
    """
    assert trace.as_written is not None
    coarse, has_jumps = float64.coarsest(trace), float64.has_jumps(trace.as_written)
    before = [virtual.inside(tensor) for tensor in written_values(trace, call.tensors)]
    return float64.verdict(candidate, plain, exactly, coarse, has_jumps=has_jumps, before=before)


def _compared(trace: Trace, values: Sequence[Any]) -> list[Any]:
    """Copies of the values for a comparison: plain tensors, and None for values without meaning."""
    nothing = meaningless_outputs(trace.as_written or trace)
    return copied([None if number in nothing else virtual.inside(value) for number, value in enumerate(values)])


def graph_run(
    trace: Trace, plan: Plan, tensors: Sequence[torch.Tensor], devices: Gpus, *, reuse_outputs: bool = False
) -> GraphRun:
    return GraphRun(trace, plan, tensors, devices, reuse_outputs=reuse_outputs)


def stream_run(
    trace: Trace, plan: Plan, tensors: Sequence[torch.Tensor], devices: Gpus, *, reuse_outputs: bool = False
) -> StreamRun:
    """A run on CUDA streams; its results are always fresh."""
    return StreamRun(trace, plan, devices)


def timed(trace: Trace, plan: Plan, devices: Gpus | None, threads: int) -> list[tuple[float, float]]:
    """Run a plan with substitute arguments, so the caller's stay unchanged; returns when each task began and ended."""
    with torch.random.fork_rng([device.index for device in devices or ()]), virtual.no_hooks():
        inputs = costs.substitute_inputs(trace)
    with untouched(trace, inputs), virtual.no_hooks():
        if devices is None:
            return torch_threads.timed_threads(trace, plan, inputs, threads)
        return timed_streams(trace, plan, inputs, devices)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a run failed because no memory was left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def can_be_repeated(trace: Trace, error: BaseException) -> bool:
    """Whether a run that failed with this error can be repeated: it has written to none of the caller's tensors."""
    return getattr(error, "nothing_was_done", False) or not written_memories(trace)


def runs_ahead(trace: Trace) -> Callable[[], bool] | None:
    """A check that outside tensors are where a run reads them; None if starting a run ahead may do harm.

    A graph holds addresses, and memory of a resized tensor may have been returned to CUDA. An operation on integers may
    use them as indices, and end the process if a replaced tensor was larger than the one that the run knows.
    """
    if written_memories(trace) or trace.gradients or random_devices(trace):
        return None
    on_gpu = all(step.task.device.startswith("gpu") and step.task.kind == "compute" for step in trace.steps)
    sources = [node.meta.get("val") for step in trace.steps for node in step.node.all_input_nodes]
    whole = any(isinstance(source, torch.Tensor) and not _is_fraction(source) for source in sources)
    if not on_gpu or whole or any(is_check(step.node) for step in trace.steps):
        return None
    tensors = trace.constant_values()
    return compat.addresses_are(tensors, [tensor.data_ptr() for tensor in tensors])


def _is_fraction(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool


def random_devices(trace: Trace) -> list[str]:
    """The devices on which the function draws random numbers."""
    return sorted({step.task.device for step in trace.steps if step.task.token is not None})


def random_state(devices: Sequence[str]) -> list[Any]:
    """The states of these devices' random generators; read before each call, so it has to be fast."""
    return [
        (generator.initial_seed(), generator.get_offset())
        if (generator := _gpu_generator(name)) is not None
        else torch.get_rng_state()
        for name in devices
    ]


def set_random_state(devices: Sequence[str], states: Sequence[Any]) -> None:
    for name, state in zip(devices, states, strict=True):
        if (generator := _gpu_generator(name)) is not None:
            generator.manual_seed(state[0])
            generator.set_offset(state[1])
        else:
            torch.set_rng_state(state)


def _gpu_generator(name: str) -> Any:
    return torch.cuda.default_generators[int(name.partition(":")[2])] if name.startswith("gpu") else None


def thread_run(trace: Trace, plan: Plan, count: int) -> ThreadRun | VirtualRun:
    """The lanes of a plan on threads of the CPU, ``count`` in all."""
    run = ThreadRun(trace, plan, count)
    return VirtualRun(trace, run) if virtual.count() else run


class VirtualRun:
    """A run on the tensors inside virtual tensors; each virtual device is a lane. Its results are on these devices."""

    concurrent = True

    def __init__(self, trace: Trace, run: ThreadRun) -> None:
        self.lanes = run.lanes
        self._run = run
        self._devices = [value.meta["val"].device if isinstance(value, Node) else None for value in trace.outputs]

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        with virtual.no_hooks():
            results = self._run.replay([virtual.inside(tensor) for tensor in inputs])
        return [
            virtual.VirtualTensor(result, device) if device is not None and virtual.is_virtual(device) else result
            for result, device in zip(results, self._devices, strict=True)
        ]


def with_threads(run: Run, count: int) -> Run:
    """The same run with ``count`` threads for each operation."""

    def limited(tensors: Sequence[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        with operation_threads(count):
            return run(tensors, arguments, keywords)

    return limited


def synchronous_run(trace: Trace, plan: Plan) -> ThreadRun | VirtualRun:
    """The plan's order in the caller's thread."""
    return thread_run(trace, torch_threads.in_order(plan), torch.get_num_threads())


def equal(results: Sequence[Any], expected: Sequence[Any]) -> tuple[bool, float]:
    """Whether results are the same to the bit, and otherwise their largest relative difference.

    It is infinite for results of different forms, and for plain values (numbers, strings, None) that differ.
    """
    worst, same = 0.0, True
    for a, b in zip(results, expected, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or repr(a) != repr(b):  # NaN equals NaN here
                return False, float("inf")
            continue
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False, float("inf")
        if torch.equal(a, b):
            continue
        difference = _relative_difference(a, b)
        if math.isfinite(difference):  # so nothing is NaN
            same, worst = False, max(worst, difference)
            continue
        if not torch.equal(a.isnan(), b.isnan()):
            return False, float("inf")
        # NaN in the same places counts as equal.
        a, b = (results.masked_fill(results.isnan(), 0) for results in (a, b))
        if not torch.equal(a, b):
            same = False
            difference = _relative_difference(a, b)
            worst = max(worst, difference if math.isfinite(difference) else float("inf"))
    return same, worst


def _relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if b.is_complex() else torch.float64
    wide_a, wide_b = a.to(wide), b.to(wide)
    return float((wide_a - wide_b).norm() / wide_b.norm().clamp(min=1e-3))


def overlapping(values: Sequence[Any]) -> set[tuple[int, int]]:
    """Pairs of results, by number, that share bytes."""
    spans = [(*shown_by(value), number) for number, value in enumerate(values) if _has_bytes(value)]
    pairs: set[tuple[int, int]] = set()
    reaching: list[tuple[int, int]] = []  # the ends and numbers of earlier spans
    for start, end, number in sorted(spans):
        reaching = [(behind, other) for behind, other in reaching if behind > start]
        pairs |= {(min(other, number), max(other, number)) for _, other in reaching}
        reaching.append((end, number))
    return pairs


def _has_bytes(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.numel() > 0


def seconds(
    run: Callable[[], object], device: Gpus | None, put_back: Callable[[], None], repeats: int = _REPEATS
) -> float:
    """The median time of one call, including the device's work, after a warm-up; fewer calls if one takes long.

    ``put_back`` is called before each.
    """
    times: list[float] = []
    for number in range(repeats + 3):
        put_back()
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        once = time.perf_counter() - start
        if number >= 3 or once > _LONG:
            times.append(once)
        if any(len(times) >= calls and sum(times) > spent for calls, spent in _ENOUGH):
            break
    return statistics.median(times[1:])


def _wait(devices: Gpus | None) -> None:
    for device in devices or ():
        torch.cuda.synchronize(device)
