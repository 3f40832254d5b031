"""Eight independent chains of products on one device: as written, on lanes, and planned by ``mh.parallel``.

One product that is too small to fill a device leaves a part of it idle. Whether others can use that part at the same
time depends on the runtime, and on who issues the work.
"""

from __future__ import annotations

from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Bound, Comparison, Finding, Plot, Series, Table, Times, seconds

_CHAINS, _LENGTH = 8, 10
_WRITTEN, _TASKS, _PLANNED, _ALONE = "as written", "tasks", "mh.parallel", "one chain alone"


@experiment("eight-operations", question="Do independent operations on one device overlap?")
def run(bench: Bench) -> Finding:
    cpu, gpu = bench.mh.cpu(), bench.gpu()
    sizes = (32, 128, 256) if bench.quick else (32, 64, 128, 256, 512, 1024)
    measured = {
        (name, size): _chains(bench, device, name, size)
        for name, device in (("CPU", cpu), ("GPU", gpu))
        if device is not None
        for size in sizes
    }
    names = list(dict.fromkeys(name for name, _ in measured))
    plots = [_plot(name, sizes, {size: measured[name, size] for size in sizes}) for name in names]
    rows = [
        (f"{name}, {size}", *(seconds(times.median(way)) for way in (_ALONE, _WRITTEN, _TASKS, _PLANNED)))
        for (name, size), times in measured.items()
    ]
    table = Table(("device, size", _ALONE, _WRITTEN, _TASKS, _PLANNED), rows, f"{_CHAINS} chains of {_LENGTH} products")
    conclusion = " ".join(_conclusion(name, {size: measured[name, size] for size in sizes}) for name in names)
    return Finding(conclusion, [table], plots)


def _chains(bench: Bench, device: Any, name: str, size: int) -> Times:
    mh, matmul = bench.mh, bench.operations.matmul
    inputs = [bench.random((size, size), device, seed, scale=size**-0.5) for seed in range(_CHAINS)]

    def chain(x: Any) -> Any:
        result = x
        for _ in range(_LENGTH):
            result = matmul(x, result)
        return result

    def as_written(*xs: Any) -> list[Any]:
        return [chain(x) for x in xs]

    def tasks() -> list[Any]:
        with mh.parallel():
            futures = [mh.task(chain)(x) for x in inputs]
        return [task.result() for task in futures]

    planned = mh.parallel(as_written)
    # The tolerance below: some GPUs multiply with 10 bits, and different kernels round differently.
    bench.say(f"planning {size} on the {name}")
    expected = as_written(*inputs)
    bench.equal(tasks(), expected, tolerance=1e-2, compared="tasks and as written")
    for _ in range(2):  # the first call plans
        bench.equal(planned(*inputs), expected, tolerance=1e-2, compared="mh.parallel and as written")
    ways = {
        _ALONE: lambda: chain(inputs[0]),
        _WRITTEN: lambda: as_written(*inputs),
        _TASKS: tasks,
        _PLANNED: lambda: planned(*inputs),
    }
    return bench.trials(ways, {"device": name, "size": size})


def _overlap(times: Times) -> float:
    """How many chains of the plain code run at once, at least, in every round."""
    return min(_CHAINS * alone / all_of_them for alone, all_of_them in zip(times[_ALONE], times[_WRITTEN], strict=True))


def _plot(name: str, sizes: tuple[int, ...], measured: dict[int, Times]) -> Plot:
    series = [
        Series(way, sizes, [measured[size].compare(way, to=_WRITTEN).ratio for size in sizes])
        for way in (_TASKS, _PLANNED)
    ]
    return Plot(
        "line",
        f"Eight independent chains on the {name}",
        series,
        x_label="rows and columns",
        y_label="times as fast as written",
        log_x=True,
        bounds=[Bound("as written", 1.0)],
    )


def _conclusion(name: str, measured: dict[int, Times]) -> str:
    most = max(_overlap(times) for times in measured.values())
    runtime = f"overlaps up to {most:.1f} chains" if most > 1.2 else "runs the chains one after the other"
    return f"On the {name} the runtime by itself {runtime}. {_gain(_TASKS, measured)} {_gain(_PLANNED, measured)}"


def _gain(way: str, measured: dict[int, Times]) -> str:
    """Where this way is faster than the plain code, and where it is slower."""
    gains: dict[int, Comparison] = {size: times.compare(way, to=_WRITTEN) for size, times in measured.items()}
    best = max(gains, key=lambda size: gains[size].ratio)
    slower = ", ".join(str(size) for size in gains if gains[size].slower)
    but = f", but slower at {slower}" if slower else ""
    if gains[best].faster:
        return f"With {way} it is up to {gains[best].ratio:.2f} times as fast (at {best} x {best}){but}."
    return f"With {way} it is faster at no size{but}."
