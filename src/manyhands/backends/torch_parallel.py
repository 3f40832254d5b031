"""What :mod:`manyhands.engine.parallel` needs of PyTorch: signatures, traces, costs, runs and their times."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten

from manyhands import tree
from manyhands.backends import torch_lanes, torch_trace
from manyhands.backends.torch_lanes import GraphRun, Plan
from manyhands.backends.torch_trace import Step, Trace
from manyhands.errors import CannotTrace
from manyhands.task import Task

name = "torch"
_REPEATS = 20
_CROWD = 8  # how many copies of an operation run at once when it is measured how much of the chip it fills


# Calls


@dataclass(frozen=True)
class Call:
    """One call's tensors, and what has to be the same for another call to be run in the same way."""

    signature: tuple[Any, ...]
    tensors: list[torch.Tensor]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    leaves, structure = tree.flatten((arguments, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
    shapes = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
    aliases = tuple(next(j for j, other in enumerate(tensors) if _same_memory(t, other)) for t in tensors)
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))

    def rebuild(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(values)
        return structure.unflatten(next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)  # type: ignore[return-value]

    return Call((structure, others, shapes, aliases, modes), tensors, rebuild)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or one.untyped_storage()._cdata == other.untyped_storage()._cdata


def trace(function: Callable[..., Any], one: Call) -> Trace:
    """Trace the function for calls of this signature."""
    if len(set(one.signature[3])) < len(one.tensors):
        raise CannotTrace("two of the arguments share memory")

    def flat(*tensors: torch.Tensor) -> Any:
        arguments, keywords = one.rebuild(tensors)
        result = function(*arguments, **keywords)
        for leaf in tree.flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                raise CannotTrace(
                    "a result carries gradients that are to be computed later: compute them inside the function "
                    "(torch.autograd.grad), or call it under torch.no_grad()"
                )
        return result

    found = torch_trace.trace(flat, [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in one.tensors])
    if any(isinstance(value, Node) and value.op == "placeholder" for value in found.outputs):
        raise CannotTrace("a result is one of the arguments")
    return found


def device_of(one: Call, found: Trace) -> torch.device | None:
    """The GPU that all steps run on, if it is one; None on the CPU."""
    devices = {step.task.device for step in found.steps}
    if devices == {"cpu"} or not devices:
        return None
    if len(devices) > 1:
        raise CannotTrace(
            f"several devices in one function ({', '.join(sorted(devices))}) are not put into one graph yet"
        )
    return torch.device("cuda", int(devices.pop().partition(":")[2]))


# Runs


@contextmanager
def untouched(found: Trace, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Trying a function out leaves no trace: what it writes to, and random numbers, are put back."""
    written = frozenset().union(*(step.task.writes for step in found.steps))
    places = [*zip(found.inputs, tensors, strict=True)]
    places += [(node, getattr(found.module, str(node.target))) for node in found.constants]
    changed = {id(t): t for node, t in places if isinstance(t, torch.Tensor) and found.storages[node] & written}
    saved = [(tensor, tensor.detach().clone()) for tensor in changed.values()]
    state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                tensor.copy_(before)
        torch.set_rng_state(state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def graph_run(found: Trace, plan: Plan, tensors: Sequence[torch.Tensor], device: torch.device) -> GraphRun:
    static = [tensor.detach() if _stays(tensor) else tensor.detach().clone() for tensor in tensors]
    return GraphRun(found, plan, static, device)


def _stays(tensor: torch.Tensor) -> bool:
    """A parameter is the same tensor at every call: read in place rather than copied."""
    return isinstance(tensor, torch.nn.Parameter)


def copied(values: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def together(values: Sequence[Any], found: Trace) -> Any:
    return torch_trace.put_together(values, found)


def flat_results(result: Any) -> list[Any]:
    return tree_flatten(result)[0]


def equal(one: Sequence[Any], other: Sequence[Any]) -> tuple[bool, float]:
    """Whether results are the same to the bit, and otherwise their largest relative difference."""
    worst, same = 0.0, True
    for a, b in zip(one, other, strict=True):
        if not isinstance(b, torch.Tensor):
            same &= a == b
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return False, float("inf")
        if not torch.equal(a, b):
            same = False
            wide_a, wide_b = a.double(), b.double()
            worst = max(worst, float((wide_a - wide_b).norm() / wide_b.norm().clamp(min=1e-3)))
    return same, worst


def seconds(run: Callable[[], object], device: torch.device | None, repeats: int = _REPEATS) -> float:
    """The median time of one call, the device's work included, after a warm-up."""
    times = []
    for number in range(repeats + 3):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        if number >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.synchronize(device)


# Costs


def costs(found: Trace, device: torch.device | None) -> list[Task]:
    """The tasks with measured seconds, and how much of the chip each fills."""
    known: dict[tuple[Any, ...], tuple[float, float]] = {}
    result = []
    for step in found.steps:
        key = _key(step)
        if key not in known:
            known[key] = _measured(step, device)
        spent, share = known[key]
        old = step.task
        result.append(Task(old.name, old.reads, old.writes, old.device, old.kind, max(spent, 1e-9), share, old.token))
    return result


def _key(step: Step) -> tuple[Any, ...]:
    def described(value: Any) -> Any:
        if isinstance(value, Node):
            meta = value.meta.get("val")
            return (meta.shape, meta.stride(), meta.dtype) if isinstance(meta, torch.Tensor) else str(type(meta))
        if isinstance(value, (list, tuple)):
            return tuple(described(one) for one in value)
        return repr(value)

    node = step.node
    return (str(node.target), described(node.args), tuple((k, described(v)) for k, v in node.kwargs.items()))


def _measured(step: Step, device: torch.device | None) -> tuple[float, float]:
    if not step.task.writes - step.task.reads or all(memory < 1 << 20 for memory in step.task.writes):
        return 0.0, 0.0  # a view
    if device is None or step.task.kind != "compute":
        return _estimate(step), 1.0
    try:
        return _on_gpu(step, device)
    except Exception:  # an operation that does not take made-up numbers
        return _estimate(step), 0.5


def _on_gpu(step: Step, device: torch.device) -> tuple[float, float]:
    """Time it alone, and in a crowd of its own kind: what a crowd adds tells how much of the chip one fills."""
    node = step.node
    sets = [([_made_up(a, device) for a in node.args], {k: _made_up(v, device) for k, v in node.kwargs.items()})]
    sets += [([_made_up(a, device) for a in node.args], dict(sets[0][1])) for _ in range(_CROWD - 1)]
    target: Any = node.target
    with torch.no_grad():
        alone = _replayed(lambda: [target(*sets[0][0], **sets[0][1]) for _ in range(_CROWD)], device) / _CROWD
        works = [functools.partial(target, *given, **named) for given, named in sets]
        crowd = _replayed(_on_streams(works, device), device)
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


def _replayed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a replay of the work as a CUDA graph."""
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    del kept
    return float(begin.elapsed_time(end)) / 5e3


def _made_up(value: Any, device: torch.device) -> Any:
    """A real value of the shape that the trace saw: random numbers, zeros where they are indices."""
    if isinstance(value, (list, tuple)):
        return type(value)(_made_up(one, device) for one in value)
    if not isinstance(value, Node):
        return value
    meta = value.meta["val"]
    made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=meta.device)
    return made.normal_() if meta.is_floating_point() else made.zero_()


def _estimate(step: Step) -> float:
    """By the bytes that it touches, at a modest bandwidth: for what cannot be measured alone."""
    nodes = [*step.node.all_input_nodes, *step.nodes]
    values = [node.meta.get("val") for node in nodes]
    count = sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
    return 1e-6 + count / (50e9 if step.task.kind == "copy" else 10e9 if step.task.device == "cpu" else 2e12)


def plan_of(kinds: Sequence[str], lane_of: Sequence[int], order: Sequence[int], waits: Any) -> Plan:
    return Plan(kinds, lane_of, order, waits)


def one_lane(found: Trace) -> Plan:
    return torch_lanes.one_lane(found)
