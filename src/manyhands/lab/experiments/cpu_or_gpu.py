"""The CPU against the GPU, by matrix size; and many small products against one large one of the same work."""

from __future__ import annotations

from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer, Plot, Sweep, Table, Times

_TIMES = 64  # 64 products of a quarter of the size are as much work as one
_CPU, _GPU, _COPIED = "CPU", "GPU", "GPU, with copies there and back"


@Experiment(
    "cpu-or-gpu",
    "From which size does a GPU pay, and do many small jobs?",
    "GPUs: a large task and a small one, on the CPU and on the GPU.",
)
def run(bench: Bench) -> Answer:
    sizes = (16, 64, 128, 256, 512) if bench.quick else (16, 32, 64, 128, 256, 512, 1024, 2048)
    sweep = Sweep((size, _products(bench, size)) for size in sizes)
    large = 512 if bench.quick else 1024
    devices = {_CPU: bench.mh.cpu()} if bench.gpu() is None else {_CPU: bench.mh.cpu(), _GPU: bench.gpu()}
    divided = {name: _division(bench, device, large) for name, device in devices.items()}
    sentences = [sweep.in_words(name, _CPU) for name in sweep.methods() if name != _CPU]
    if bench.gpu() is None:
        rates = [f"{2e-9 * size**3 / sweep[size].median(_CPU):.3g} GFLOP/s at {size}" for size in (sizes[0], sizes[-1])]
        sentences.append(f"There is no GPU here, so this is the CPU's half: {' and '.join(rates)}.")
    title = f"One product of {large} x {large}, or {_TIMES} of a quarter of the size, on the"
    parts: list[Table | Plot] = [*sweep.shown("One product by size", "size", "rows and columns")]
    for name, times in divided.items():
        small = times.compare(f"{_TIMES} small", to="one large")
        sentences.append(f"On the {name}, the work of one product in {_TIMES} small ones {small}.")
        parts += times.shown(f"{title} {name}", "one large")
    return Answer.of(" ".join(sentences), *parts)


def _products(bench: Bench, size: int) -> Times:
    mh, matmul = bench.mh, bench.operations.matmul
    x = bench.random((size, size), mh.cpu())
    methods: dict[str, Any] = {_CPU: lambda: matmul(x, x)}
    if (gpu := bench.gpu()) is not None:
        there = mh.to(x, gpu)
        methods[_GPU] = lambda: matmul(there, there)
        methods[_COPIED] = lambda: mh.to(matmul(copy := mh.copy(x, gpu), copy), mh.cpu())
        for name, method in methods.items():
            bench.equal(method(), matmul(x, x), tolerance=1e-2, compared=f"{name} and CPU")  # TF32 has 10 bits
    return bench.trials(methods, {"size": size})


def _division(bench: Bench, device: Any, large: int) -> Times:
    """One large product against 64 of a quarter of its size."""
    matmul = bench.operations.matmul
    whole = bench.random((large, large), device)
    small = bench.random((large // 4, large // 4), device)
    methods = {
        "one large": lambda: matmul(whole, whole),
        f"{_TIMES} small": lambda: [matmul(small, small) for _ in range(_TIMES)],
    }
    return bench.trials(methods, {"large": large, "small": large // 4})
