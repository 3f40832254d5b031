"""Two graphs whose dependencies nobody wants to schedule by hand.

- The book's two-layer MLP on a CPU and two devices: the weights go from the host to both devices, each computes the
  gradients of its half of the batch, the host adds them up and updates the weights.
- A wavefront: a tile needs the tile above it and the tile to its left, so the tiles of a diagonal can run at once. The
  rows alternate between the devices.

``mh.parallel`` gets the plain functions. It must find the operations that can run at once, and give the same results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Finding, Plot, Sweep

_PLAIN, _PLANNED = "plain code", "mh.parallel"
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


@Experiment(
    "harder-graphs",
    "Does mh.parallel find what may run at once where dependencies are tangled?",
    "Automatic parallelism: more complex data dependencies, with correct results and better performance.",
    devices=2,
)
def run(bench: Bench) -> Finding:
    is_torch = bench.framework == "torch"
    # In the other frameworks, mh.parallel hands the function to the runtime as one program on one device.
    devices = bench.devices(2) if is_torch else bench.devices(1) * 2
    move = (lambda x, device: x.to(device)) if is_torch else (lambda x, device: x)
    notes, plots, sweep = [], list[Plot](), Sweep()
    for make in (_mlp, _wavefront):
        function, arguments = make(bench, devices, move)
        name = function.__name__
        bench.say(f"planning {name}")
        fast = bench.mh.parallel(function, pure=True)
        fast(*arguments)  # plans
        bench.equal(fast(*arguments), function(*arguments), tolerance=0.0 if is_torch else 1e-4, compared=name)
        methods = {_PLAIN: lambda: function(*arguments), _PLANNED: lambda: fast(*arguments)}  # noqa: B023
        sweep[name] = bench.trials(methods, {"graph": name})
        plots.append(sweep[name].bars(name))
        notes.append(f"{fast.explain().splitlines()[0]}.")
        if is_torch and fast.planned.schedule is not None:
            plots.append(Plot("drawing", f"{name}: the graph", drawing=_graph_svg(fast)))
            timeline = fast.measured()
            plots.append(Plot("timeline", f"{name}: {timeline.title or fast.planned.method}", spans=timeline.spans))
    if not is_torch:
        notes.append("mh.parallel hands functions to the framework's runtime: one device here, and no plan to draw.")
    same = "Both give the numbers of the plain functions" + (", to the bit." if is_torch else ".")
    table = sweep.table("graph", "Two graphs", gain=_PLANNED, to=_PLAIN)
    return Finding(f"{same} {sweep.in_words(_PLANNED, _PLAIN)}", [table], plots, notes)


def _graph_svg(fast: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path: Path = fast.draw(Path(folder) / "graph.svg")
        return path.read_text()
