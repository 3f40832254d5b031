"""Reading and writing the parameters of a model that is on a device: what each method costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.amounts import count_of
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Table, Times, seconds

_NUMBERS, _TENSORS, _AT_ONCE, _HERE = "number by number", "tensor by tensor", "all at once", "computed on the device"


@Experiment(
    "parameter-access",
    "What does it cost to read and write parameters on a device?",
    "GPUs: how should we read and write model parameters on the GPU?",
    apart=True,
)
def run(bench: Bench) -> Answer:
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
    sentences, parts = [], list[Table | Plot]()
    for verb in methods:
        times = bench.trials(methods[verb], {"direction": verb, "parameters": count})
        numbers = {name: few if name == _NUMBERS else count for name in times}
        each = Times({name: [spent / numbers[name] for spent in every] for name, every in times.items()})
        best = min((_TENSORS, _AT_ONCE), key=each.median)
        title = f"Time to {verb} one number, of {count_of(count, 'parameter')} in {count_of(len(shapes), 'tensor')}"
        parts += each.shown(title, best)
        sentences.append(
            f"To {verb} number by number costs {seconds(each.median(_NUMBERS))} a number, "
            f"{each.median(_NUMBERS) / each.median(best):,.0f} times as much as in whole tensors ({best})."
        )
    sentences.append(
        f"To compute new values on the device takes {each.median(_HERE) / each.median(best):.0%} of the time of "
        "writing them."
    )
    note = f"Number by number: the first {count_of(few, 'number')} of the first tensor."
    return Answer.of(" ".join(sentences), *parts, notes=[note])
