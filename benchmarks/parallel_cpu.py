"""What CPU lanes give: plain execution with one thread and with all of them against ``parallel``, in the same run.

    python benchmarks/parallel_cpu.py [rounds]

Every row is measured in rounds: each way once a round, in turns, so that a load from outside falls on all of them; the
times are medians, and the ratio is the median of the rounds' ratios of the better plain way of each row to the other.
"chosen" is what ``parallel`` decided on by itself; "lanes" is the schedule on as many lanes as threads, used or not.
Results are compared with plain execution before anything is timed. Targets on two cores: 1.15 for 400 products of
200x200, and never below 0.95 for what was chosen: at the end it is said whether a row is, and then the exit code is 1.
"""

from __future__ import annotations

import operator
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import parallel_limits
import torch

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.call import call
from manyhands.backends.torch.capture.whole import trace_whole
from manyhands.machine import host_name
from manyhands.parallel.candidates import better
from manyhands.parallel.costs import costs
from manyhands.parallel.function import Parallel
from manyhands.schedule.check import check
from manyhands.schedule.graph import graph

LEAST = 0.95  # of the better plain way's speed

Program = Callable[..., list[torch.Tensor]]


def products(length: int) -> Program:
    """A chain of products for each argument."""

    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in inputs:
            y = x
            for _ in range(length):
                y = y @ x
            results.append(y)
        return results

    return program


def branches(width: int) -> Program:
    """Products that branch from one value and are added up, again and again."""

    def program(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        for start in range(0, len(weights), width):
            parts = [x @ weight for weight in weights[start : start + width]]
            x = torch.stack(parts).sum(0)
        return [x]

    return program


def elementwise(length: int) -> Program:
    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in inputs:
            for _ in range(length):
                x = (x * 1.01).tanh()
            results.append(x)
        return results

    return program


def square(size: int, count: int) -> list[torch.Tensor]:
    return [torch.randn(size, size) / size**0.5 for _ in range(count)]


def rows() -> list[tuple[str, Program, list[torch.Tensor]]]:
    repeated = square(200, 8)
    return [
        ("400 products 200x200, 8 chains", products(50), square(200, 8)),
        ("400 products 200x200, 50 x 8 branches", branches(8), [*square(200, 1), *(repeated * 50)][:401]),
        ("8 products 1024x1024, 4 chains", products(2), square(1024, 4)),
        ("elementwise, 4 chains of 20 on 1M", elementwise(10), [torch.randn(1_000_000) for _ in range(4)]),
        ("elementwise, 4 chains of 20 on 10k", elementwise(10), [torch.randn(10_000) for _ in range(4)]),
        ("400 products 8x8, 8 chains", products(50), square(8, 8)),
    ]


def main(rounds: int) -> int:
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {host_name()}, {threads} threads")
    print(f"load before: {os.getloadavg()[0]:.1f}; {rounds} rounds after a warm-up; milliseconds, medians")
    print(f"{'':<40}{'1 thread':>9}{f'{threads} threads':>10}{'lanes':>9}{'chosen':>9}  lanes  chosen  spread  as")
    chosen: dict[str, float] = {}
    for name, program, inputs in rows():
        with torch.no_grad():
            chosen[name] = one_row(name, program, inputs, threads, rounds)
    print(f"load after: {os.getloadavg()[0]:.1f}")
    return parallel_limits.report_below(chosen, LEAST, "the better plain way")


def one_row(name: str, program: Program, inputs: list[torch.Tensor], threads: int, rounds: int) -> float:
    """Measure and print a row; how many times as fast as the better plain way what was chosen is."""
    inputs = [tensor.clone() for tensor in inputs]
    chosen, lanes = Parallel(program, pure=True), on_lanes(program, inputs, threads)
    expected = program(*inputs)
    for results in (chosen(*inputs), lanes()):
        same, difference = planning.equal(results, expected)
        assert same or difference < 1e-5, f"{name}: results differ by {difference:.1e}"
    ways = [plain(program, inputs, 1), plain(program, inputs, threads), lanes, lambda: chosen(*inputs)]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for place in range(len(ways)):
            way = (place + number) % len(ways)
            ways[way]()  # whose threads spin, or whose data is in the cache, is not the one before
            start = time.perf_counter()
            ways[way]()
            if number:
                times[way].append(time.perf_counter() - start)
    medians = [statistics.median(seconds) for seconds in times]
    faster = min(times[:2], key=statistics.median)
    ratios = [statistics.median(map(operator.truediv, faster, seconds)) for seconds in times[2:]]
    quarters = statistics.quantiles(faster, n=4)
    spread = quarters[2] / quarters[0]
    print(
        f"{name:<40}{medians[0] * 1e3:9.2f}{medians[1] * 1e3:10.2f}{medians[2] * 1e3:9.2f}{medians[3] * 1e3:9.2f}"
        f"  {ratios[0]:5.2f}  {ratios[1]:6.2f}  {spread:6.2f}  {chosen.planned.how}",
        flush=True,
    )
    return ratios[1]


def plain(program: Program, inputs: list[torch.Tensor], threads: int) -> Callable[[], Any]:
    def run() -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        result = program(*inputs)
        torch.set_num_threads(before)
        return result

    return run


def on_lanes(program: Program, inputs: list[torch.Tensor], threads: int) -> Callable[[], Any]:
    """As many lanes as threads, whether that is better or not."""
    trace = trace_whole(program, call(tuple(inputs), {})).trace
    measured = graph(costs(trace, None).tasks)
    _, planned = better(measured, threads)
    check(planned)
    run = planning.thread_run(trace, planned, threads)
    return lambda: run.replay(inputs)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
