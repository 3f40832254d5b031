"""The row of `benchmarks/parallel.py` that asks what a call costs the host."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import parallel_cases
import torch
from parallel_case import Case, synchronize
from parallel_results import Wanted, copied
from parallel_ways import COMPILED, OURS, captured, with_manyhands
from torch.utils._pytree import tree_map


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
    works |= {f"{name}, arguments elsewhere at every call": elsewhere(case, name) for name in OURS if name != COMPILED}
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


def elsewhere(case: Case, name: str) -> Callable[[], Any]:
    """A way of ours, with the arguments and with copies of them in turns: it never comes to read them in place."""
    _, fast = with_manyhands(case, name)
    arguments = itertools.cycle((case.arguments, tree_map(torch.clone, case.arguments)))
    return lambda: fast(*next(arguments))
