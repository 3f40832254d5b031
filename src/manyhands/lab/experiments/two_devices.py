"""Two devices, fifty matrix products each: one after the other, and at once.

The book's first example of automatic parallelism: the work on one device does not depend on the other device, so both
can be busy at the same time.
"""

from __future__ import annotations

import time
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Bound, Comparison, Finding, Plot
from manyhands.schedule.pictures.timeline import Span

_PRODUCTS = 50


@experiment("two-devices", question="Do two devices work at once?", devices=2)
def run(bench: Bench) -> Finding:
    mh, matmul = bench.mh, bench.operations.matmul
    size = bench.size(gpu=4000, cpu=600, quick=400)
    inputs = [bench.random((size, size), device, seed) for seed, device in enumerate(bench.devices(2))]

    def products(x: Any) -> Any:
        result = x
        for _ in range(_PRODUCTS):
            result = matmul(x, x)
        return result

    def one_after_the_other() -> list[Any]:
        results = []
        for x in inputs:
            results.append(products(x))
            mh.synchronize()
        return results

    def at_once() -> list[Any]:
        with mh.parallel():
            tasks = [mh.task(products)(x) for x in inputs]
        return [task.result() for task in tasks]

    def when(x: Any) -> tuple[float, float]:
        start = time.perf_counter()
        bench.operations.number(products(x), 0)  # the host waits for this device's work
        return start, time.perf_counter()

    bench.equal(at_once(), one_after_the_other())
    ways = {
        "first device alone": lambda: products(inputs[0]),
        "second device alone": lambda: products(inputs[1]),
        "one after the other": one_after_the_other,
        "at once": at_once,
    }
    times = bench.trials(ways, {"size": size, "products": _PRODUCTS})
    slower = max(times.median("first device alone"), times.median("second device alone"))
    gain = times.compare("at once", to="one after the other")
    with mh.parallel():
        tasks = [mh.task(when)(x) for x in inputs]
    shown = _spans("one after the other", [when(x) for x in inputs]) + _spans("at once", [t.result() for t in tasks])
    title = f"{_PRODUCTS} products of {size} x {size} on each of two devices"
    bounds = [Bound("the slower device alone", slower)]
    plots = [times.bars(title, bounds), Plot("timeline", f"{title}: when each works", spans=shown)]
    return Finding(
        _conclusion(gain, slower / times.median("at once")), [times.table(to="one after the other", title=title)], plots
    )


def _spans(way: str, moments: list[tuple[float, float]]) -> list[Span]:
    begin = min(start for start, _ in moments)
    return [
        Span(way, f"device {number}, {way}", start - begin, stop - begin)
        for number, (start, stop) in enumerate(moments)
    ]


def _conclusion(gain: Comparison, part: float) -> str:
    """``part``: the time of the slower device alone, as a fraction of the time of both at once."""
    if gain.faster:
        return (
            f"Yes: both at once is {gain.ratio:.2f} times as fast as one after the other. The slower device alone "
            f"takes {part:.0%} of that time, which is the least that both can take."
        )
    if gain.slower:
        return f"No: both at once takes {1 / gain.ratio:.2f} times as long as one after the other."
    return f"No clear gain: both at once {gain}, compared with one after the other."
