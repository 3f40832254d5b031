"""How a training step is captured: its graphs, what is copied between them, and what the host spends on a call.

    python benchmarks/training_steps.py --programs branchy-cnn-train,gpt-train --device cuda

For each program: the pieces that Dynamo captures; of each graph its operations, the bytes of arguments that are read in
place (parameters, buffers, states of optimizers) and of those that a CUDA graph would copy in, and the bytes of
results; then the time of a call with a wait after it, of a call in a row of calls, and until the host has issued it,
each beside plain execution.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import suite_programs
import torch

import manyhands.torch as mh
from manyhands.backends.torch.dynamo.backend import _PlannedGraph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="branchy-cnn-train", help="names, or parts of names, with commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50, help="calls that are timed")
    parser.add_argument("--quick", action="store_true", help="small nets")
    settings = parser.parse_args()
    device = torch.device(settings.device)
    for program in suite_programs.programs(settings.quick).values():
        if program.trains and any(name in program.name for name in settings.programs.split(",")):
            show(program, device, settings.steps)


def show(program: suite_programs.Program, device: torch.device, steps: int) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = suite_programs.Running(program, device, dtype)
    times = {"plain": measured(functools.partial(plain.call, *plain.arguments), device, steps)}
    del plain
    running, graphs = suite_programs.Running(program, device, dtype), dict[Any, str]()
    fast = mh.parallel(running.call)
    binding = _PlannedGraph._bind

    def bind(graph: Any, arguments: tuple[Any, ...], instead_of: Any = None) -> Any:
        bound = binding(graph, arguments, instead_of)
        graphs[graph] = described(graph, bound, arguments)
        return bound

    _PlannedGraph._bind = bind  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        fast(*running.arguments)
        wait(device)
        first = time.perf_counter() - start
        times["parallel"] = measured(lambda: fast(*running.arguments), device, steps)
    finally:
        _PlannedGraph._bind = binding  # type: ignore[method-assign]
    print(f"{program.name}: first call {first:.1f} s")
    for text in graphs.values():
        print(f"  {text}")
    for name, (alone, row, host) in times.items():
        print(f"  {name:9s} {alone * 1e3:8.3f} ms with a wait, {row * 1e3:8.3f} in a row, host {host * 1e3:8.3f}")
    print("  " + "\n  ".join(fast.explain().splitlines()))


def described(graph: Any, bound: Any, arguments: tuple[Any, ...]) -> str:
    """A graph, and how many of its bytes are copied."""
    kind = "backward" if graph._is_backward else "graph"
    operations = sum(node.op == "call_function" for node in graph._planned_part.graph.nodes)
    tensors = {number: value for number, value in enumerate(arguments) if isinstance(value, torch.Tensor)}
    fixed = {*bound.in_place}
    in_place = megabytes(tensors[number] for number in fixed)
    copied = megabytes(value for number, value in tensors.items() if number not in fixed)
    outputs = next(node for node in graph._planned_part.graph.nodes if node.op == "output").args[0]
    values = [getattr(output, "meta", {}).get("val") for output in outputs]
    results = megabytes(value for value in values if isinstance(value, torch.Tensor))
    unplanned = "" if bound.plan is not None else ", not planned"
    return (
        f"{kind}: {operations} operations; {len(fixed)} arguments read in place ({in_place:.1f} MB), "
        f"{len(tensors) - len(fixed)} copied in, on a GPU ({copied:.1f} MB); {len(values)} results "
        f"({results:.1f} MB){unplanned}"
    )


def megabytes(tensors: Any) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def measured(call: Callable[[], object], device: torch.device, steps: int) -> tuple[float, float, float]:
    """Seconds of a call with a wait, of one in a row, and until the host has issued it (medians, and a mean)."""
    for _ in range(48):  # capture, choice, and graphs that read arguments in place
        call()
    alone, host = [], []
    for _ in range(steps):
        wait(device)
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        wait(device)
        alone.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(steps):
        call()
    wait(device)
    return statistics.median(alone), (time.perf_counter() - start) / steps, statistics.median(host)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
