"""Two products on two devices against two on one: how near to twice as fast?

Every task has a fixed cost, so small products gain little from a second device, and large products gain nearly all.
"""

from __future__ import annotations

import functools
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Bound, Comparison, Finding, Plot, Series, Table, seconds

_ONE, _TWO = "two on one device", "two on two devices"


@experiment("how-linear", question="Are two devices twice as fast as one?", devices=2)
def run(bench: Bench) -> Finding:
    mh, matmul = bench.mh, bench.operations.matmul
    devices = bench.devices(2)
    largest = bench.size(gpu=4096, cpu=2048, quick=1024)
    sizes = [size for size in (64, 128, 256, 512, 1024, 2048, 4096) if size <= largest]

    def on_one_device(x: Any) -> list[Any]:
        return [matmul(x, x), matmul(x, x)]

    def on_two_devices(xs: list[Any]) -> list[Any]:
        with mh.parallel():
            tasks = [mh.task(matmul)(x, x) for x in xs]
        return [task.result() for task in tasks]

    gains: dict[int, Comparison] = {}
    rows = []
    for size in sizes:
        inputs = [bench.random((size, size), device) for device in devices]
        ways: dict[str, Any] = {
            _ONE: functools.partial(on_one_device, inputs[0]),
            _TWO: functools.partial(on_two_devices, inputs),
        }
        bench.equal(ways[_TWO](), ways[_ONE](), tolerance=1e-3)
        times = bench.trials(ways, {"size": size})
        gains[size] = gain = times.compare(_TWO, to=_ONE)
        rows.append((str(size), seconds(times.median(_ONE)), seconds(times.median(_TWO)), f"{gain.ratio:.2f}"))
    best = max(sizes, key=lambda size: gains[size].ratio)
    title = "Two products on two devices against two on one"
    plot = Plot(
        "line",
        title,
        [Series("times as fast", sizes, [gains[size].ratio for size in sizes])],
        x_label="rows and columns",
        y_label="times as fast as one device",
        log_x=True,
        bounds=[Bound("linear", 2.0), Bound("no gain", 1.0)],
    )
    table = Table(("size", _ONE, _TWO, "times as fast"), rows, title)
    return Finding(_conclusion(gains, best), [table], [plot])


def _conclusion(gains: dict[int, Comparison], best: int) -> str:
    pays = [size for size in gains if gains[size].faster]
    if not pays:
        return f"No: two devices are not clearly faster at any size up to {max(gains)} x {max(gains)}."
    near = f"{gains[best].ratio:.2f} times as fast at {best} x {best}, {gains[best].ratio / 2:.0%} of linear"
    behind = [size for size in gains if size < min(pays)]
    small = f" Below {min(pays)} x {min(pays)} there is no clear gain." if behind else ""
    return (
        f"{'Almost' if gains[best].ratio > 1.8 else 'Not quite' if gains[best].ratio > 1.4 else 'No'}: {near}.{small}"
    )
