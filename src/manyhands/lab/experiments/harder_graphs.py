"""Three graphs whose dependencies nobody wants to schedule by hand.

- The book's two-layer MLP on a CPU and two devices: the weights go from the host to both devices, each computes the
  gradients of its half of the batch, the host adds them up and updates the weights.
- A wavefront: a tile needs the tile above it and the tile to its left, so the tiles of a diagonal can run at once. The
  rows alternate between the devices.
- A diamond with updates in place: two branches start from one tensor, which is overwritten while both still need
  the old numbers.

``mh.parallel`` gets the plain functions. It must find the operations that can run at once, and give the same results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Comparison, Finding, Plot, Series, Table, Times, seconds

_Graph = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments


def _mlp(bench: Bench, devices: Sequence[Any], move: Callable[[Any, Any], Any]) -> _Graph:
    matmul, transpose = bench.operations.matmul, bench.operations.transpose
    width, host = bench.size(gpu=2048, cpu=384, quick=256), bench.mh.cpu()

    def mlp(inputs: Any, targets: Any, w1: Any, w2: Any) -> Any:
        gradients = []
        for x, target, device in zip(inputs, targets, devices, strict=True):
            a, b = move(w1, device), move(w2, device)
            z = matmul(x, a)
            hidden = z * z
            error = matmul(hidden, b) - target
            back = matmul(error, transpose(b)) * z
            gradients.append((matmul(transpose(x), back), matmul(transpose(hidden), error)))
        for g1, g2 in gradients:
            w1, w2 = w1 - move(g1, host) * 1e-4, w2 - move(g2, host) * 1e-4
        return w1, w2

    halves = [[bench.random((width, width), device, seed) for device in devices] for seed in (0, 1)]
    return mlp, (*halves, *(bench.random((width, width), host, seed) * 0.05 for seed in (2, 3)))


def _wavefront(bench: Bench, devices: Sequence[Any], move: Callable[[Any, Any], Any]) -> _Graph:
    matmul, relu = bench.operations.matmul, bench.operations.relu
    size, side = bench.size(gpu=1024, cpu=192, quick=160), 6

    def wavefront(x: Any, weights: Any) -> Any:
        above = [x] * side
        for row in range(side):
            device = devices[row % len(devices)]
            left = move(x, device)
            for column in range(side):
                left = relu(matmul(move(above[column], device) + left, weights[row % len(devices)]))
                above[column] = left
        return above[-1]

    weights = [bench.random((size, size), device) * (0.7 / size**0.5) for device in devices]
    return wavefront, (bench.random((size, size), devices[0], 1), weights)


def _diamond(bench: Bench, devices: Sequence[Any], move: Callable[[Any, Any], Any]) -> _Graph:
    matmul = bench.operations.matmul
    size = bench.size(gpu=2048, cpu=384, quick=256)

    def diamond(x: Any, left_weight: Any, right_weight: Any) -> Any:
        top = matmul(x, left_weight)
        left, right = matmul(top, left_weight), matmul(move(top, devices[1]), right_weight)
        top *= 0.5  # in place: both branches need the old numbers
        left += top
        right *= 2.0
        left, right = matmul(left, left_weight), matmul(right, right_weight)
        left += move(right, devices[0])
        return left + top

    weights = [bench.random((size, size), device, seed) * size**-0.5 for seed, device in enumerate(devices)]
    return diamond, (bench.random((size, size), devices[0], 2), *weights)


@experiment(
    "harder-graphs", question="Does mh.parallel find what may run at once where dependencies are tangled?", devices=2
)
def run(bench: Bench) -> Finding:
    is_torch = bench.framework == "torch"
    # In the other frameworks, mh.parallel hands the function to the runtime as one program on one device.
    devices = bench.devices(2) if is_torch else bench.devices(1) * 2
    move = (lambda x, device: x.to(device)) if is_torch else (lambda x, device: x)
    rows, plots, all_times = [], list[Plot](), dict[str, Times]()
    for make in (_mlp, _wavefront, _diamond):
        function, arguments = make(bench, devices, move)
        name = function.__name__
        bench.say(f"planning {name}")
        fast = bench.mh.parallel(function)
        fast(*arguments)  # plans
        bench.equal(fast(*arguments), function(*arguments), tolerance=0.0 if is_torch else 1e-4, compared=name)
        ways = {"as written": lambda: function(*arguments), "mh.parallel": lambda: fast(*arguments)}  # noqa: B023
        times = all_times[name] = bench.trials(ways, {"graph": name})
        schedule = fast.planned.schedule if is_torch else None
        run_as = fast.explain().splitlines()[0].removeprefix(f"{name}: run ").removeprefix("as ")
        tasks = "" if schedule is None else str(len(schedule.graph))
        gain = times.compare("mh.parallel", to="as written").ratio
        medians = [seconds(times.median(way)) for way in ways]
        rows.append((name, tasks, run_as, *medians, f"{gain:.2f}"))
        if schedule is not None:
            plots.append(Plot("drawing", f"{name}: the graph", drawing=_drawn(fast)))
            timeline = fast.measured()
            plots.append(Plot("timeline", f"{name}: {timeline.title or run_as}", spans=timeline.spans))
    table = Table(("graph", "tasks", "run as", "as written", "mh.parallel", "gain"), rows, "Three graphs")
    bars = [
        Series(
            way,
            list(all_times),
            [times.median(way) for times in all_times.values()],
            [times[way] for times in all_times.values()],
        )
        for way in ("as written", "mh.parallel")
    ]
    overview = Plot("bar", "Three graphs", bars, y_label="time (shorter is better)", unit="s")
    notes = (
        []
        if is_torch
        else [
            f"In {bench.framework} mh.parallel hands a function to the framework's runtime as a program of one device: "
            "all three graphs are on one device here, and there is no plan to draw."
        ]
    )
    gains = {name: times.compare("mh.parallel", to="as written") for name, times in all_times.items()}
    return Finding(_conclusion(gains, is_torch), [table], [overview, *plots], notes)


def _drawn(fast: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path: Path = fast.draw(Path(folder) / "graph.svg")
        return path.read_text()


def _conclusion(gains: dict[str, Comparison], to_the_bit: bool) -> str:
    faster = [f"{name} {gain.ratio:.2f} times" for name, gain in gains.items() if gain.faster]
    slower = [f"{name} (by {1 / gain.ratio - 1:.0%})" for name, gain in gains.items() if gain.slower]
    same = [name for name, gain in gains.items() if not gain.faster and not gain.slower]
    parts = ["All three give the numbers of the plain functions" + (", to the bit." if to_the_bit else ".")]
    if faster:
        parts.append(f"mh.parallel is faster for {len(faster)} of {len(gains)}: {', '.join(faster)} as fast.")
    else:
        parts.append("mh.parallel is faster for none of them.")
    if same:
        parts.append(f"No clear difference for {', '.join(same)}.")
    if slower:
        parts.append(f"It is slower for {', '.join(slower)}.")
    return " ".join(parts)
