"""What a row of `benchmarks/parallel.py` is made of, and work spread over streams by hand.

A case has a plain function and its arguments, and as far as they make sense: the same with hand-written streams, as
one batched operation, compiled. All give the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

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
