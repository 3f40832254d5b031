"""Eight independent chains of products on one device: as written, as tasks, and planned by ``mh.parallel``."""

from __future__ import annotations

from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Sweep, Table, Times
from manyhands.machine import usable_cores

_CHAINS, _LENGTH = 8, 10
_ALONE, _PLAIN, _TASKS, _PLANNED = "one chain alone", "plain code", "tasks", "mh.parallel"


@Experiment(
    "eight-operations",
    "Do independent operations on one device overlap?",
    "Automatic parallelism: are eight independent operations executed in parallel, also small ones?",
)
def run(bench: Bench) -> Answer:
    sizes = (32, 128, 256) if bench.quick else (32, 64, 128, 256, 512, 1024)
    sentences, parts = [], list[Table | Plot]()
    for name, device in (("CPU", bench.mh.cpu()), ("GPU", bench.gpu())):
        if device is None:
            continue
        sweep = Sweep((size, _chains(bench, device, name, size)) for size in sizes)
        overlap = max(_CHAINS * times.median(_ALONE) / times.median(_PLAIN) for times in sweep.values())
        by_itself = f"overlaps up to {overlap:.1f} chains" if overlap > 1.2 else "runs the chains one after the other"
        # A captured graph also saves launches, so its gain has no such limit.
        most = min(_CHAINS, usable_cores()) if name == "CPU" else _CHAINS
        gains = f"{sweep.in_words(_TASKS, _PLAIN, most)} {sweep.in_words(_PLANNED, _PLAIN)}"
        sentences.append(f"On the {name} the runtime by itself {by_itself}. {gains}")
        title = f"{_CHAINS} chains of {_LENGTH} products on the {name}"
        parts += sweep.shown(title, "size", "rows and columns", gain=_PLANNED, to=_PLAIN)
    return Answer.of(" ".join(sentences), *parts)


def _chains(bench: Bench, device: Any, name: str, size: int) -> Times:
    mh, matmul = bench.mh, bench.operations.matmul
    inputs = [bench.random((size, size), device, seed, scale=size**-0.5) for seed in range(_CHAINS)]

    def chain(x: Any) -> Any:
        result = x
        for _ in range(_LENGTH):
            result = matmul(x, result)
        return result

    def plain(*xs: Any) -> list[Any]:
        return [chain(x) for x in xs]

    def tasks() -> list[Any]:
        with mh.parallel():
            futures = [mh.task(chain)(x) for x in inputs]
        return [task.result() for task in futures]

    planned = mh.parallel(plain, pure=True)
    bench.say(f"planning {size} on the {name}")
    planned(*inputs)
    for results, method in ((tasks(), _TASKS), (planned(*inputs), _PLANNED)):
        # Some GPUs multiply with 10 bits, and different kernels round differently.
        bench.equal(results, plain(*inputs), tolerance=1e-2, compared=f"{method} and {_PLAIN}")
    methods = {
        _ALONE: lambda: chain(inputs[0]),
        _PLAIN: lambda: plain(*inputs),
        _TASKS: tasks,
        _PLANNED: lambda: planned(*inputs),
    }
    return bench.trials(methods, {"device": name, "size": size})
