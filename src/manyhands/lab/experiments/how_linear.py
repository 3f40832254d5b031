"""Two devices against one: fifty products on each, one after the other and at once; and two products, by size."""

from __future__ import annotations

import time
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import EFFICIENCY, Answer, Plot, Sweep
from manyhands.schedule.timeline import Span

_PRODUCTS = 50
_ONE, _TWO = "two on one device", "two on two devices"
_IN_TURN, _AT_ONCE = "one after the other", "at once"


@Experiment(
    "how-linear",
    "Are two devices twice as fast as one?",
    "GPUs: two matrix products at the same time on two GPUs, and in sequence on one.",
    devices=2,
)
def run(bench: Bench) -> Answer:
    size = bench.size(gpu=4000, cpu=600, quick=400)
    inputs = [bench.random((size, size), device, seed) for seed, device in enumerate(bench.devices(2))]
    spans: dict[str, list[Span]] = {}  # of the latest run

    def products(device: int) -> tuple[Any, Span]:
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            result = bench.operations.matmul(inputs[device], inputs[device])
        bench.number(result)  # the host waits for this device's work
        return result, Span("", f"device {device}", start, time.perf_counter())

    def one_after_the_other() -> list[Any]:
        results, moments = zip(*(products(device) for device in (0, 1)), strict=True)
        spans[_IN_TURN] = list(moments)
        return list(results)

    def at_once() -> list[Any]:
        with bench.mh.parallel():
            tasks = [bench.mh.task(products)(device) for device in (0, 1)]
        results, moments = zip(*(task.result() for task in tasks), strict=True)
        spans[_AT_ONCE] = list(moments)
        return list(results)

    bench.equal(at_once(), one_after_the_other())
    times = bench.trials(
        {
            "first device alone": lambda: products(0),
            "second device alone": lambda: products(1),
            _IN_TURN: one_after_the_other,
            _AT_ONCE: at_once,
        },
        {"size": size, "products": _PRODUCTS},
    )
    gain = times.compare(_AT_ONCE, to=_IN_TURN, most=2)
    slower = max(list(times)[:2], key=times.median)
    times.compare(_AT_ONCE, to=slower, most=EFFICIENCY)
    title = f"{_PRODUCTS} products of {size} x {size} on each of two devices"
    shown = list[Span]()
    for name, moments in spans.items():
        begin = min(span.start for span in moments)
        shown += [Span(name, f"{name}: {span.lane}", span.start - begin, span.stop - begin) for span in moments]
    sweep = _by_size(bench)
    compared = f"Both at once {gain}, compared with one after the other."
    return Answer.of(
        f"{compared} {sweep.in_words(_TWO, _ONE, most=2)}",
        *times.shown(title, _IN_TURN, {"the slower device alone": times.median(slower)}, list(times)[:2]),
        Plot("timeline", f"{title}: when each works", spans=shown),
        *sweep.shown("Two products on one device and on two", "size", "rows and columns", gain=_TWO, to=_ONE),
    )


def _by_size(bench: Bench) -> Sweep:
    mh, matmul = bench.mh, bench.operations.matmul
    largest, sweep = bench.size(gpu=4096, cpu=2048, quick=1024), Sweep()
    for size in (size for size in (64, 128, 256, 512, 1024, 2048, 4096) if size <= largest):
        x, y = (bench.random((size, size), device) for device in bench.devices(2))

        def on_one(x: Any = x) -> list[Any]:
            return [matmul(x, x), matmul(x, x)]

        def on_two(x: Any = x, y: Any = y) -> list[Any]:
            with mh.parallel():
                tasks = [mh.task(matmul)(each, each) for each in (x, y)]
            return [task.result() for task in tasks]

        bench.equal(on_two(), on_one(), tolerance=1e-3)
        sweep[size] = bench.trials({_ONE: on_one, _TWO: on_two}, {"size": size})
    return sweep
