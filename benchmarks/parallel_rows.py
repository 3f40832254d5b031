"""Rows of `benchmarks/parallel.py` that are no cases: what a call costs the host, and what planning takes.

Targets for one schedule, proved and simulated, without a framework: 0.1 s for 1,000 tasks, 2 s for 10,000; the same for
holding one back, so that no more than half of what it makes is there at once. Beside the time on the clock is that of
the processor, which a busy machine changes less.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import parallel_cases
import torch
from parallel_ways import COMPILED, OURS, Wanted, captured, copied, synchronize, with_manyhands

from manyhands.schedule.check import check
from manyhands.schedule.graph import Task, graph
from manyhands.schedule.lanes import Lane, Schedule, limit_memory, schedule
from manyhands.schedule.memory import Footprint, one_after_the_other, peak
from manyhands.schedule.simulate import simulate


def overhead(device: torch.device, quick: bool, count: int) -> dict[str, Any]:
    """What a call of ours costs the host beyond the replay of a CUDA graph (on a CPU: beyond the function).

    The time of the host alone: nothing is waited for. So many chains of small products: two lists of as many arguments,
    and a list of as many results. To replay a graph with branches takes the host longer than one without, so both are
    there.
    """
    case = parallel_cases.chains(64, device, count=count, length=4)
    name = f"replay overhead, arguments: {2 * count}, results: {count}"
    row: dict[str, Any] = {"name": name, "seconds": {}, "left_out": {}, "bounds": {}}
    works = {"one-stream graph": captured(case.function, case.arguments, device)}
    by_hand = "streams in a graph"
    works[by_hand] = captured(case.captured[by_hand], case.arguments, device)
    works |= {name: with_manyhands(case, name)[0] for name in OURS if name != COMPILED}
    wanted = Wanted(case)
    for name, work in list(works.items()):
        for _ in range(100):  # ours reads its arguments in place by then
            work()
        right, words, _ = wanted.judge(copied(work()))
        if not right:
            row["left_out"][name] = words
            del works[name]
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(200 if quick else 1000):  # in turns: a load from outside falls on all of them
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
            synchronize(device)
    row["seconds"] = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(row["name"])
    bare = [row["seconds"].get(name, math.nan) for name in ("one-stream graph", by_hand)]
    for name, seconds in row["seconds"].items():
        beyond = " and ".join(f"{(seconds - plain) * 1e6:+.1f}" for plain in bare)
        print(f"  host time of a call, {name}: {seconds * 1e6:.1f} us; beyond these two graphs {beyond} us")
    return row


def planning() -> dict[str, Any]:
    """From tasks to one proved and simulated schedule on 8 lanes, no framework: three forms of graphs."""
    row: dict[str, Any] = {"name": "planning", "seconds": {}, "left_out": {}, "bounds": {}}
    for count in (1000, 10_000):
        for form, tasks in _programs(count).items():
            lanes = [Lane("gpu:0", "compute", number) for number in range(8)] + [Lane("gpu:0", "copy out")]
            # Memories with numbers below zero are the caller's.
            memories = {memory for task in tasks for memory in task.writes if memory >= 0}
            footprint = Footprint(dict.fromkeys(memories, 1), frozenset(), frozenset())
            held = 0.0
            times, processor = [], []
            for _ in range(3):
                start, begin = time.perf_counter(), time.process_time()
                planned = schedule(graph(tasks), lanes, switch_seconds=1e-6)
                check(planned)
                simulate(planned, wait_seconds=1e-6)
                times.append(time.perf_counter() - start)
                processor.append(time.process_time() - begin)
                begin = time.process_time()

                def peak_of(scheduled: Schedule, footprint: Footprint = footprint) -> int:
                    return peak(scheduled.graph.tasks, footprint, one_after_the_other(scheduled.order))

                check(limit_memory(planned, peak_of, len(memories) // 2))
                held = max(held, time.process_time() - begin)
            name = f"{count} tasks, {form}"
            row["seconds"][name] = statistics.median(times)
            text = f"{row['seconds'][name] * 1e3:.1f} ms, processor {statistics.median(processor) * 1e3:.1f} ms"
            text += f"; held back {held * 1e3:.1f} ms more"
            print(f"  schedule, check, simulate {name}: {text}")
    return row


def _programs(count: int) -> dict[str, list[Task]]:
    def task(number: int, reads: set[int], writes: int) -> Task:
        return Task("t", frozenset(reads), frozenset({writes}), "gpu:0", seconds=1e-6 * (1 + number % 5), share=0.2)

    def copy(number: int) -> Task:
        return Task("copy", frozenset({number}), frozenset({-1 - number}), "gpu:0", "copy out", seconds=1e-6)

    return {
        "each is copied out": [step for i in range(1, count, 2) for step in (task(i, {-1}, i), copy(i))],
        "each needs two earlier ones": [task(i, {i - 7, i - 31}, i) for i in range(count)],
        "eight chains": [task(i, {i % 8}, i % 8) for i in range(count)],
        "one to all to one": [*(task(i, {-1}, i) for i in range(count - 1)), task(0, set(range(count - 1)), -1)],
    }
