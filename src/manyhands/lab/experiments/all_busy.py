"""The CPU, a device and the bus between them, all busy at once.

They are three resources: a product on the host, a product on the device and a copy between them do not depend on each
other. At best, all three together take as long as the longest of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Bound, Finding, Plot
from manyhands.schedule.pictures.timeline import Span

_REPEATS = 20


@experiment("all-busy", question="Can the CPU, a device and the bus be busy at once?", apart=True)
def run(bench: Bench) -> Finding:
    mh, matmul = bench.mh, bench.operations.matmul
    (device,), host = bench.devices(1), mh.cpu()
    on_host = bench.random((bench.size(gpu=1000, cpu=600, quick=400),) * 2, host, 1)
    on_device = bench.random((bench.size(gpu=4000, cpu=600, quick=400),) * 2, device, 2)
    large = bench.random((bench.size(gpu=64, cpu=4, quick=2), 2**20), host, 3)
    if not bench.virtual and (pinned := bench.operations.pin(large)) is not None:
        large = pinned  # the device reads page-locked memory without the host's help

    def compute(x: Any) -> Any:
        for _ in range(_REPEATS):
            result = matmul(x, x)
        return result

    def copy() -> Any:
        if bench.virtual:  # between devices of one CPU, a move may share memory; a copy may not
            return [mh.copy(large, device) for _ in range(_REPEATS)][-1]
        for _ in range(_REPEATS):
            arrival = mh.to(large, device, wait=False)
            while not arrival.ready():
                time.sleep(1e-4)
        return arrival.result()

    work = {"CPU": lambda: compute(on_host), "device": lambda: compute(on_device), "bus": copy}

    def one_after_the_other() -> list[Any]:
        results = []
        for part in work.values():
            results.append(part())
            mh.synchronize()
        return results

    def at_once() -> list[Any]:
        with mh.parallel(threads=len(work)):
            tasks = [mh.task(part)() for part in work.values()]
        return [task.result() for task in tasks]

    bench.equal(at_once(), one_after_the_other())
    ways = {**work, "one after the other": one_after_the_other, "at once": at_once}
    times = bench.trials(ways)
    longest = max(work, key=times.median)
    bound = Bound(f"the longest alone ({longest})", times.median(longest))
    gain = times.compare("at once", to="one after the other")
    near = times.median("at once") / bound.value
    if gain.faster:
        conclusion = f"Yes: at once is {gain.ratio:.2f} times as fast, {near:.2f} times the bound."
    elif gain.slower:
        conclusion = f"No: at once takes {1 / gain.ratio:.2f} times as long as one after the other."
    else:
        conclusion = f"Not here: at once {gain}, compared with one after the other."
    title = "CPU, device and bus"
    timeline = Plot("timeline", "All three at once", spans=_spans(bench, work))
    plots = [times.bars(title, [bound]), timeline]
    return Finding(conclusion, [times.table(to="one after the other", title=title)], plots, _notes(bench))


def _spans(bench: Bench, work: dict[str, Callable[[], Any]]) -> list[Span]:
    """When each part began and ended, in one run of all parts."""
    mh = bench.mh

    def timed(name: str, part: Callable[[], Any]) -> Span:
        begin = time.perf_counter()
        result = part()
        if name != "bus":  # the copies have arrived
            bench.operations.number(result, 0)  # the host waits for the result
        return Span(name, name, begin, time.perf_counter())

    with mh.parallel(threads=len(work)):
        tasks = [mh.task(timed)(name, part) for name, part in work.items()]
    return [task.result() for task in tasks]


def _notes(bench: Bench) -> list[str]:
    if not bench.virtual:
        return []
    return ["Here the device and the bus are the host's too: three kinds of work share its cores and its memory."]
