"""Two graphs whose dependencies nobody wants to schedule by hand: the book's two-layer MLP, and a wavefront."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Sweep

_PLAIN, _PLANNED = "plain code", "mh.parallel"
_Graph = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments


def _mlp(bench: Bench, devices: Sequence[Any]) -> _Graph:
    """Each device computes the gradients of its half of the batch; the host adds them up and updates the weights."""
    matmul = bench.operations.matmul
    width, host = bench.size(gpu=2048, cpu=384, quick=256), bench.mh.cpu()

    def mlp(inputs: Any, targets: Any, w1: Any, w2: Any) -> Any:
        gradients = []
        for x, target, device in zip(inputs, targets, devices, strict=True):
            a, b = w1.to(device), w2.to(device)
            z = matmul(x, a)
            hidden = z * z
            error = matmul(hidden, b) - target
            back = matmul(error, b.T) * z
            gradients.append((matmul(x.T, back), matmul(hidden.T, error)))
        for g1, g2 in gradients:
            w1, w2 = w1 - g1.to(host) * 1e-4, w2 - g2.to(host) * 1e-4
        return w1, w2

    halves = [[bench.random((width, width), device, seed) for device in devices] for seed in (0, 1)]
    return mlp, (*halves, *(bench.random((width, width), host, seed) * 0.05 for seed in (2, 3)))


def _wavefront(bench: Bench, devices: Sequence[Any]) -> _Graph:
    """A tile needs the tiles above and to its left; the rows alternate between the devices."""
    matmul = bench.operations.matmul
    size, side = bench.size(gpu=1024, cpu=192, quick=160), 6

    def wavefront(x: Any, weights: Any) -> Any:
        above = [x] * side
        for row in range(side):
            device = devices[row % len(devices)]
            left = x.to(device)
            for column in range(side):
                left = matmul(above[column].to(device) + left, weights[row % len(devices)]).relu()
                above[column] = left
        return above[-1]

    weights = [bench.random((size, size), device) * (0.7 / size**0.5) for device in devices]
    return wavefront, (bench.random((size, size), devices[0], 1), weights)


@Experiment(
    "harder-graphs",
    "Does mh.parallel find what may run at once where dependencies are tangled?",
    "Automatic parallelism: more complex data dependencies, with correct results and better performance.",
    frameworks=("torch",),  # the others hand the function to a runtime of their own, which shows no plan
    devices=2,
)
def run(bench: Bench) -> Answer:
    devices, plots, notes, sweep = bench.devices(2), list[Plot](), [], Sweep()
    for make in (_mlp, _wavefront):
        function, arguments = make(bench, devices)
        name = function.__name__
        bench.say(f"planning {name}")
        fast = bench.mh.parallel(function, pure=True)
        fast(*arguments)  # plans
        bench.equal(fast(*arguments), function(*arguments), compared=name)
        methods = {_PLAIN: lambda: function(*arguments), _PLANNED: lambda: fast(*arguments)}  # noqa: B023
        sweep[name] = bench.trials(methods, {"graph": name})
        plots.append(sweep[name].bars(name))
        notes.append(f"{fast.explain().splitlines()[0]}.")
        if fast.planned.schedule is not None:
            plots.append(Plot("drawing", f"{name}: the graph", drawing=_graph_svg(fast)))
            timeline = fast.measure()
            plots.append(Plot("timeline", f"{name}: {timeline.title}", spans=timeline.spans))
    table = sweep.table("graph", "Two graphs", gain=_PLANNED, to=_PLAIN)
    same = "Both give the numbers of the plain functions, to the bit."
    return Answer(f"{same} {sweep.in_words(_PLANNED, _PLAIN)}", [table], plots, notes)


def _graph_svg(fast: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path: Path = fast.draw(Path(folder) / "graph.svg")
        return path.read_text()
