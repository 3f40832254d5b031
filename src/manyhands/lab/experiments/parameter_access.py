"""Reading and writing the parameters of a model that is on a device: what each method costs.

A single number costs a round trip between host and device, and so does every tensor that is copied separately.
Computing on the device costs no round trip at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.amounts import counted
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Finding, Plot, Series, Table, seconds

_NUMBERS, _TENSORS, _AT_ONCE, _HERE = "number by number", "tensor by tensor", "all at once", "computed on the device"


@Experiment(
    "parameter-access",
    "What does it cost to read and write parameters on a device?",
    "GPUs: how should we read and write model parameters on the GPU?",
    apart=True,
)
def run(bench: Bench) -> Finding:
    mh, operations = bench.mh, bench.operations
    (device,), host = bench.devices(1), mh.cpu()  # in this order: JAX's runtime starts with mh.cpu()
    width, few = bench.size(gpu=1024, cpu=384, quick=128), bench.size(gpu=50, cpu=50, quick=40)
    shapes = [(width, width), (1, width)] * bench.size(gpu=20, cpu=20, quick=20)  # weights and biases
    values = [bench.random(shape, host, seed) for seed, shape in enumerate(shapes)]
    parameters = mh.copy(values, device)

    def write_numbers() -> Any:
        weight = parameters[0]
        for index in range(few):
            weight = operations.with_number(weight, index, 0.5)
        return weight

    methods: dict[str, dict[str, Callable[[], Any]]] = {
        "read": {
            _NUMBERS: lambda: [bench.number(parameters[0], index) for index in range(few)],
            _TENSORS: lambda: [mh.to(x, host) for x in parameters],
            _AT_ONCE: lambda: mh.to(parameters, host, wait=False).result(),
        },
        "write": {
            _TENSORS: lambda: [mh.to(x, device) for x in values],
            _AT_ONCE: lambda: mh.to(values, device, wait=False).result(),
            _HERE: lambda: [x * 0.5 for x in parameters],
            _NUMBERS: write_numbers,
        },
    }
    for name in (_TENSORS, _AT_ONCE):
        got = methods["read"][name](), methods["write"][name]()
        bench.equal(got, (values, values), compared=f"parameters, {name}")
    count = sum(rows * columns for rows, columns in shapes)
    rows, plots, sentences = [], [], []
    for verb in methods:
        times = bench.trials(methods[verb], {"direction": verb, "parameters": count})
        each = {name: times.median(name) / (few if name == _NUMBERS else count) for name in times}
        rows += [(f"{verb}, {name}", seconds(times.median(name)), seconds(each[name])) for name in times]
        bars = Series("time of one number", list(each), list(each.values()))
        plots.append(Plot("bar", f"Time to {verb} one number", [bars], y_label="time", unit="s", log=True))
        best = min((_TENSORS, _AT_ONCE), key=each.__getitem__)
        sentences.append(
            f"To {verb} number by number costs {seconds(each[_NUMBERS])} a number, {each[_NUMBERS] / each[best]:,.0f} "
            f"times as much as in whole tensors ({best})."
        )
    sentences.append(
        f"To compute new values on the device takes {each[_HERE] / each[best]:.0%} of the time of writing them."
    )
    title = f"{counted(count, 'parameter')} in {counted(len(shapes), 'tensor')}"
    table = Table(("method", "time", "per number"), rows, title)
    note = f"Number by number: the first {counted(few, 'number')} of the first tensor."
    return Finding(" ".join(sentences), [table], plots, [note])
