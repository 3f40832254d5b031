"""What rows of `benchmarks/parallel.py` are made of: cases, ways to run them, and whether their results are the same.

A case has a plain function and its arguments, and as far as they make sense: the same with hand-written streams, as
one batched operation, compiled. All give the same tensors: to the bit, or as exact as eager's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from exact import float64
from exact.exactness import CannotBeExact
from torch.utils._pytree import tree_leaves

from manyhands.backends.torch.run.own_streams import new_stream, reserve_workspaces
from manyhands.backends.torch.run.streams import reset_generator
from manyhands.parallel.function import Parallel

Work = Callable[..., Any]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Case:
    """One row: the plain function, and the other ways to the same results."""

    name: str
    function: Work
    arguments: tuple[Any, ...]
    # Ways that are run as they are, and ways that are captured in a CUDA graph first.
    others: dict[str, Work] = field(default_factory=dict)
    captured: dict[str, Work] = field(default_factory=dict)
    compiled: Callable[[], Work] | None = None
    # What bounds the row from below: timed in the same run, not compared.
    bounds: dict[str, Work] = field(default_factory=dict)
    close: float = 1e-4
    # The function in float64, where ways round differently: then they are to be as exact as eager, which computes with
    # numbers as coarse as these.
    exact: Work | None = None
    coarse: torch.dtype = torch.float32
    # The settings under which all of it is made, checked and timed.
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    graph: bool = True  # whether the plain function can be captured as it is
    naive: str = "eager"  # what people write first; the table's column "eager" is of it


def streams_on(count: int, device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []


def spread(works: Sequence[Callable[[], Any]], streams: Sequence[Any]) -> list[Any]:
    """By hand: each piece of work on the next stream, all behind and before the current one."""
    if not streams:
        return [work() for work in works]
    current = torch.cuda.current_stream()
    results = []
    for stream in streams:
        stream.wait_stream(current)
    for number, work in enumerate(works):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(work())
    for stream in streams:
        current.wait_stream(stream)
    return results


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


def copied(results: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def difference(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """0 where all is equal to the bit, else the norm of the difference over that of what was expected, all together."""
    if len(results) != len(expected) or any(a.shape != b.shape for a, b in zip(results, expected, strict=True)):
        return float("inf")
    if all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
        return 0.0
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(results, expected, strict=True))
    whole = sum(float(b.double().square().sum()) for b in expected)
    return (apart / max(whole, 1e-300)) ** 0.5


class Wanted:
    """What eager gives, and how other results stand to it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._expected = copied(case.function(*case.arguments))

    @functools.cached_property
    def _exactly(self) -> list[torch.Tensor]:
        assert self._case.exact is not None
        return copied(self._case.exact(*self._case.arguments))

    def judge(self, results: list[torch.Tensor]) -> tuple[bool, str, float]:
        """Whether results are right, in words, and their difference from eager's."""
        apart = difference(results, self._expected)
        if apart == 0:
            return True, "equal to the bit", apart
        if self._case.exact is not None and apart < float("inf"):
            with contextlib.suppress(CannotBeExact):
                coarse = torch.finfo(self._case.coarse).eps
                verdict = float64.verdict(results, self._expected, self._exactly, coarse)
                if verdict.accepted:
                    return True, f"as exact as eager ({verdict.error:.2f} of its error)", apart
                return False, f"NOT EQUAL to eager, and {verdict.words}", apart
        if apart <= self._case.close:
            return True, f"equal to {apart:.0e}", apart
        return False, f"NOT EQUAL to eager: {apart:.1e}", apart
