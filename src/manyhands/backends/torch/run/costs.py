"""The cost of an operation in PyTorch: measured with substitute numbers, or estimated by a roofline.

On a CPU an operation is timed with one thread, as a lane calls it. On a GPU it is timed as a CUDA graph of several
copies, first one after the other and then side by side: the difference shows how much of the chip one copy fills.

The cost of an operation that cannot be measured alone is estimated: the time to move the bytes that it touches, or the
time of its multiplications and additions, whichever is longer, at rates that are measured once.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from manyhands import machine
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace, TracedStep
from manyhands.backends.torch.run import threads
from manyhands.backends.torch.run.bindings import native, node_key
from manyhands.backends.torch.run.graph_nodes import instantiate
from manyhands.backends.torch.run.streams import Gpus, capture_graph
from manyhands.backends.torch.run.threads import operation_threads
from manyhands.backends.torch.virtual import no_hooks
from manyhands.schedule.graph import Task

_LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_ISSUE = 8e-6  # seconds that Python takes to issue an operation
_CROWD = 8  # copies of an operation that run at once, to measure how much of the chip one fills
_LAUNCH = 1e-6  # seconds that the smallest operation takes
_DRAWN = 1 << 14  # random numbers that are drawn for a substitute tensor; the rest of it repeats them
_TO_HOST = 50e9  # bytes a second between a GPU and page-locked memory of the host


def tasks(trace: Trace, device: Gpus | None) -> list[Task]:
    """The tasks of a trace, for lanes of a GPU or (None) for threads of the CPU."""
    return threads.tasks(trace) if device is None else trace.tasks


def hardware(device: Gpus | None) -> str:
    """What costs depend on besides the operation itself."""
    precisions = "/".join(compat.fp32_precision("cuda", of) for of in ("matmul", "conv"))
    parts = [f"torch {torch.__version__}", machine.host_name(), f"{torch.get_num_threads()} threads", precisions]
    if device is not None:
        names = ", ".join(torch.cuda.get_device_name(gpu) for gpu in device)
        parts.append(f"{names}, CUDA {torch.version.cuda}")
    if compat.count_dispatch_modes():
        parts.append("virtual devices")
    return "; ".join(parts)


def cost_keys(trace: Trace) -> list[str]:
    """Equal for operations that cost the same."""
    return [hashlib.sha256(repr(node_key(step.node)).encode()).hexdigest()[:24] for step in trace.steps]


def measure(trace: Trace, number: int, device: Gpus | None) -> tuple[float, float] | None:
    """Seconds, and the share of its device that the operation fills; None if it cannot be measured alone."""
    step = trace.steps[number]
    if not isinstance(step.node.target, compat.OpOverload):
        return None  # compiled code is the whole graph: the race times it
    try:
        if device is None or step.task.device == "cpu":
            with no_hooks():
                # It reads bytes that the forward pass has saved, and a trace does not know how many.
                return None if step.node.target is _LSTM_BACKWARD else _on_cpu(step)
        if step.task.is_view:
            return 0.0, 0.0
        return None if step.task.kind != "compute" else _on_gpu(step, _gpu(step))
    except Exception:  # the operation does not accept substitute numbers
        return None


def _gpu(step: TracedStep) -> torch.device:
    return torch.device("cuda", int(step.task.device.partition(":")[2]))


def _on_cpu(step: TracedStep) -> tuple[float, float]:
    """The minimum time of several calls with one thread; views count too, because calling them takes as long."""
    target = native(step.node)
    share = 1 / torch.get_num_threads()
    least, spent = float("inf"), 0.0
    arguments, named = _arguments(step)
    with torch.no_grad(), operation_threads(1):
        target(*arguments, **named)
        for calls in range(1, 21):
            start = time.perf_counter()
            target(*arguments, **named)
            now = time.perf_counter() - start
            least, spent = min(least, now), spent + now
            # One call may take long because another program had the processor: a long operation takes so long again.
            if spent > 50e-3 or (spent > 2e-3 and calls >= 3):
                break
    # Python issues one operation at a time: threads with tiny operations mostly wait for their turn.
    return least, max(share, min(1.0, _ISSUE / least))


def _on_gpu(step: TracedStep, device: torch.device) -> tuple[float, float]:
    """Times one copy, then several at once: the added time shows how much of the chip one copy fills."""
    sets = [_arguments(step) for _ in range(_CROWD)]
    target: Any = step.node.target
    with torch.no_grad(), torch.cuda.device(device):
        alone = _seconds_of_replay(lambda: [target(*sets[0][0], **sets[0][1]) for _ in range(_CROWD)], device) / _CROWD
        works = [functools.partial(target, *arguments, **named) for arguments, named in sets]
        crowd = _seconds_of_replay(_on_streams(works, device), device)
    return alone, min(1.0, max(1 / _CROWD, crowd / (_CROWD * alone)))


def _on_streams(works: Sequence[Callable[[], Any]], device: torch.device) -> Callable[[], Any]:
    streams = [torch.cuda.Stream(device) for _ in works]

    def run() -> list[Any]:
        current = torch.cuda.current_stream(device)
        results = []
        for stream, work in zip(streams, works, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in streams:
            current.wait_stream(stream)
        return results

    return run


def _seconds_of_replay(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a replay of the work as a CUDA graph."""
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*CUDA Graph is empty.*")  # an operation without kernels costs nothing
        with capture_graph(graph, device):
            results = work()
        instantiate(graph, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    del results
    return float(begin.elapsed_time(end)) / 5e3


# Substitute arguments


def _arguments(step: TracedStep) -> tuple[Any, Any]:
    return map_arg(step.node.args, _substitute), map_arg(step.node.kwargs, _substitute)


def substitute_inputs(trace: Trace) -> list[torch.Tensor]:
    """Tensors like those that the function was traced with."""
    return [_substitute(node) for node in trace.inputs]


def _substitute(node: Node) -> torch.Tensor:
    """A real tensor of the shape that the trace saw: random numbers, or zeros for integers, which may be indices.

    The numbers are between zero and one: a probability outside that range makes some GPU kernels end the process.
    """
    meta = node.meta["val"]
    # Fill the memory before applying the strides: an expanded tensor cannot be written to.
    count = compat.reach(meta)
    if not meta.is_floating_point():
        return torch.zeros(count, dtype=meta.dtype, device=meta.device).as_strided(meta.shape, meta.stride())
    numbers = torch.empty(count, dtype=meta.dtype, device=meta.device)
    numbers[:_DRAWN].uniform_()
    filled = _DRAWN
    while filled < count:  # drawing all of them would take longer than most operations
        numbers[filled : 2 * filled] = numbers[: min(filled, count - filled)]
        filled *= 2
    return numbers.as_strided(meta.shape, meta.stride())


# The roofline


def rates(device: Gpus | None) -> tuple[float, float]:
    """Multiplications and additions per second, and bytes per second, of one thread or of the GPU."""
    where = torch.device("cpu") if device is None else device[0]
    size, count = (256, 1 << 20) if device is None else (4096, 1 << 27)
    with torch.no_grad(), operation_threads(1):
        a, b = torch.rand(size, size, device=where), torch.zeros(count, device=where)
        product = min(seconds(lambda: a @ a, device) for _ in range(4))
        copy = min(seconds(b.clone, device) for _ in range(4))
    return 2 * size**3 / product, 8 * count / copy


def seconds(work: Callable[[], object], devices: Gpus | None) -> float:
    """The time of one call, including the work of these devices."""
    _wait(devices)
    start = time.perf_counter()
    work()
    _wait(devices)
    return time.perf_counter() - start


def _wait(devices: Gpus | None) -> None:
    for device in devices or ():
        torch.cuda.synchronize(device)


def estimate(trace: Trace, number: int, device: Gpus | None, known: tuple[float, float]) -> tuple[float, float]:
    """Seconds by the roofline: the longer of computing and moving bytes."""
    step = trace.steps[number]
    values = [node.meta.get("val") for node in [*step.node.all_input_nodes, *step.nodes]]
    touched = sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
    if step.task.kind.startswith("copy"):
        return _LAUNCH + touched / 2 / _TO_HOST, 1.0
    share = 1 / torch.get_num_threads() if device is None else 0.5
    return _LAUNCH + max(_operations(step.node) / known[0], touched / known[1]), share


def _operations(node: Node) -> float:
    """The number of multiplications and additions, if PyTorch can count them."""
    counted = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if counted is None:
        return 0.0
    try:
        values: list[Any] = [map_arg(part, lambda source: source.meta["val"]) for part in (node.args, node.kwargs)]
        total = float(counted(*values[0], **values[1], out_val=node.meta["val"]))
    except Exception:  # the counter does not expect results of this form
        return 0.0
    return total if math.isfinite(total) else 0.0
