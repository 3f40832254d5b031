"""Ways to run a case of `benchmarks/parallel.py`: in a CUDA graph, compiled, by hand, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parallel_case import Case

from manyhands.backends.torch.run.own_streams import new_stream, reserve_workspaces
from manyhands.backends.torch.run.streams import reset_generator
from manyhands.parallel.function import Parallel

COMPILED = "manyhands, compile"
OURS: dict[str, dict[str, bool]] = {
    "manyhands": {},
    "manyhands, reuse": {"reuse_outputs": True},
    COMPILED: {"reuse_outputs": True, "compile": True},
}


class Skipped(Exception):
    """A way that is not tried here, and why."""


def captured(function: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device) -> Callable[[], Any]:
    """The function in one CUDA graph, on one stream unless it uses more itself."""
    if device.type != "cuda":
        return lambda: function(*arguments)
    side = new_stream(device)  # its workspaces survive the compiled way, which frees all others
    side.wait_stream(torch.cuda.current_stream(device))
    reserve_workspaces([side], device)
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*arguments)
    torch.cuda.current_stream(device).wait_stream(side)
    reserve_workspaces([side], device)
    torch.cuda.synchronize(device)
    taken = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(taken, stream=side):
            results = function(*arguments)
    except Exception:
        reset_generator(device)  # or all rows after this one would fail, too
        raise

    def replay() -> Any:
        taken.replay()
        return results

    return replay


def compiled(case: Case, device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        raise Skipped("compiled on a GPU only")
    torch._dynamo.reset()
    inductor = case.compiled() if case.compiled else _marked(torch.compile(case.function, mode="reduce-overhead"))
    return lambda: inductor(*case.arguments)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return function(*arguments)

    return call


def with_manyhands(case: Case, name: str) -> tuple[Callable[[], Any], Parallel]:
    fast = Parallel(case.function, **OURS[name])
    return lambda: fast(*case.arguments), fast


def ways(case: Case, device: torch.device) -> dict[str, Callable[[], Callable[[], Any]]]:
    """For each way what makes it, so that each is made when its turn comes and its memory goes with it."""
    arguments = case.arguments
    makers: dict[str, Callable[[], Callable[[], Any]]] = {}
    for name, other in case.others.items():
        makers[name] = lambda other=other: lambda: other(*arguments)  # type: ignore[misc]
    if case.graph:
        makers["one-stream graph"] = lambda: captured(case.function, arguments, device)
        makers["compile, reduce-overhead"] = lambda: compiled(case, device)
    for name, other in case.captured.items():
        makers[name] = lambda other=other: captured(other, arguments, device)  # type: ignore[misc]
    return makers
