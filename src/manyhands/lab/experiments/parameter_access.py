"""Reading and writing the parameters of a model that is on a device: what each way costs.

The exercise of the book's chapter on GPUs. A single number costs a round trip between host and device, and so does
every tensor that is copied separately. Computing on the device costs no round trip at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manyhands.amounts import counted
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Finding, Plot, Series, Table, Times, seconds

_Ways = dict[str, Callable[[], Any]]
_ONE_BY_ONE = "number by number"


@experiment("parameter-access", question="What does it cost to read and write parameters on a device?", apart=True)
def run(bench: Bench) -> Finding:
    mh, operations = bench.mh, bench.operations
    (device,), host = bench.devices(1), mh.cpu()  # in this order: JAX's runtime starts with mh.cpu()
    width = bench.size(gpu=1024, cpu=384, quick=128)
    single_numbers = bench.size(gpu=50, cpu=50, quick=40)  # numbers that are read or written one by one
    shapes = [(width, width), (1, width)] * bench.size(gpu=20, cpu=20, quick=20)  # weights and biases
    values = [bench.random(shape, host, seed) for seed, shape in enumerate(shapes)]
    parameters = mh.copy(values, device)

    def write_numbers() -> Any:
        weight = parameters[0]
        for index in range(single_numbers):
            weight = operations.with_number(weight, index, 0.5)
        return weight

    reading: _Ways = {
        _ONE_BY_ONE: lambda: [operations.number(parameters[0], index) for index in range(single_numbers)],
        "tensor by tensor": lambda: [mh.to(x, host) for x in parameters],
        "all at once": lambda: mh.to(parameters, host, wait=False).result(),
        "joined first": lambda: operations.cut(mh.to(operations.join(parameters), host), shapes),
    }
    writing: _Ways = {
        _ONE_BY_ONE: write_numbers,
        "tensor by tensor": lambda: [mh.to(x, device) for x in values],
        "all at once": lambda: mh.to(values, device, wait=False).result(),
        "joined first": lambda: operations.cut(mh.to(operations.join(values), device), shapes),
        "computed on the device": lambda: [x * 0.5 for x in parameters],
    }
    for way in ("tensor by tensor", "all at once", "joined first"):
        bench.equal((reading[way](), writing[way]()), (values, values), compared=f"parameters, {way}")
    count = sum(rows * columns for rows, columns in shapes)
    each: dict[str, dict[str, float]] = {}
    rows = []
    for verb, ways in {"read": reading, "write": writing}.items():
        times = bench.trials(ways, {"direction": verb, "parameters": count})
        each[verb] = {way: times.median(way) / (single_numbers if way == _ONE_BY_ONE else count) for way in ways}
        rows += _rows(verb, times, each[verb])
    title = f"{counted(count, 'parameter')} in {counted(len(shapes), 'tensor')}"
    table = Table(("way", "time", "per number"), rows, title)
    plots = [
        Plot("bar", f"Time to {verb} one number", [_bars(seconds_each)], y_label="time", unit="s", log_y=True)
        for verb, seconds_each in each.items()
    ]
    note = f"Number by number: the first {counted(single_numbers, 'number')} of the first tensor."
    return Finding(_conclusion(each, count), [table], plots, [note])


def _bars(each: Mapping[str, float]) -> Series:
    return Series("time of one number", list(each), list(each.values()))


def _rows(verb: str, times: Times, each: Mapping[str, float]) -> list[tuple[str, ...]]:
    return [(f"{verb}, {way}", seconds(times.median(way)), seconds(each[way])) for way in times]


def _conclusion(each: dict[str, dict[str, float]], count: int) -> str:
    best = {
        verb: min(("tensor by tensor", "all at once", "joined first"), key=seconds_each.__getitem__)
        for verb, seconds_each in each.items()
    }
    ratio = each["read"][_ONE_BY_ONE] / each["read"][best["read"]]
    written = each["write"][_ONE_BY_ONE] / each["write"][best["write"]]
    stays = each["write"]["computed on the device"] / each["write"][best["write"]]
    return (
        f"Read number by number, each number costs {seconds(each['read'][_ONE_BY_ONE])}: {ratio:,.0f} times as much as "
        f"in whole tensors (cheapest here: {best['read']}, {seconds(each['read'][best['read']] * count)} for all). "
        f"Written number by number, {written:,.0f} times as much ({best['write']} is cheapest). "
        + (
            f"To compute new values on the device takes {stays:.0%} of the time of writing them from the host."
            if stays < 0.95
            else "To compute new values on the device saves no time here: its memory is the host's."
        )
    )
