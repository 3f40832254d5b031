"""The CPU against the GPU, by matrix size; and many small products against one large one of the same work.

A GPU has a fixed cost for every operation and for every copy. Small products are not worth that cost.
"""

from __future__ import annotations

from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Comparison, Finding, Plot, Series, Table, Times, seconds

_QUICK, _FULL = (16, 64, 128, 256, 512), (16, 32, 64, 128, 256, 512, 1024, 2048)
_TIMES = 64  # 64 products of a quarter of the size are as much work as one


@experiment("cpu-or-gpu", question="From which size does a GPU pay, and do many small jobs?")
def run(bench: Bench) -> Finding:
    sizes = _QUICK if bench.quick else _FULL
    measured = {size: _products(bench, size) for size in sizes}
    large = 512 if bench.quick else 1024
    divided = _divided(bench, large)
    plot = Plot(
        "line",
        "One product by size",
        [Series(name, list(sizes), [measured[size].median(name) for size in sizes]) for name in measured[sizes[0]]],
        x_label="rows and columns",
        y_label="time of a product",
        unit="s",
        log_x=True,
        log_y=True,
    )
    rows = [
        (str(size), *(f"{seconds(times.median(name))} ({_rate(size, times.median(name))})" for name in times))
        for size, times in measured.items()
    ]
    tables = [
        Table(("size", *measured[sizes[0]]), rows, plot.title),
        divided.table(to=next(iter(divided)), title=f"One product of {large}, and as much work in small ones"),
    ]
    bars = divided.bars(f"One product of {large} x {large}, or {_TIMES} of {large // 4} x {large // 4}")
    conclusion = f"{_where_it_pays(bench, measured)} {_small_against_large(divided)}"
    return Finding(conclusion, tables, [plot, bars])


def _products(bench: Bench, size: int) -> Times:
    mh, matmul = bench.mh, bench.operations.matmul
    x = bench.random((size, size), mh.cpu())
    ways: dict[str, Any] = {"CPU": lambda: matmul(x, x)}
    gpu = bench.gpu()
    if gpu is not None:
        there = mh.to(x, gpu)
        ways["GPU"] = lambda: matmul(there, there)
        ways["GPU, with copies there and back"] = lambda: mh.to(_square(bench, mh.copy(x, gpu)), mh.cpu())
        for name, way in ways.items():
            bench.equal(way(), matmul(x, x), tolerance=1e-2, compared=f"{name} and CPU")  # TF32 has 10 bits
    return bench.trials(ways, {"size": size})


def _divided(bench: Bench, large: int) -> Times:
    """One large product against 64 of a quarter of its size, on each device."""
    mh = bench.mh
    ways: dict[str, Any] = {}
    gpu = bench.gpu()
    for name, device in {"CPU": mh.cpu(), **({} if gpu is None else {"GPU": gpu})}.items():
        whole = bench.random((large, large), device)
        small = bench.random((large // 4, large // 4), device)
        ways[f"{name}: one large"] = lambda x=whole: _square(bench, x)
        ways[f"{name}: {_TIMES} small"] = lambda x=small: [_square(bench, x) for _ in range(_TIMES)]
    return bench.trials(ways, {"large": large, "small": large // 4})


def _square(bench: Bench, x: Any) -> Any:
    return bench.operations.matmul(x, x)


def _rate(size: int, spent: float) -> str:
    return f"{2e-9 * size**3 / spent:.3g} GFLOP/s"


def _where_it_pays(bench: Bench, measured: dict[int, Times]) -> str:
    if bench.gpu() is None:
        first, last = min(measured), max(measured)
        low, high = (_rate(size, measured[size].median("CPU")) for size in (first, last))
        return (
            f"There is no GPU here, so this is the CPU's half: from {low} at {first} x {first} to {high} at "
            f"{last} x {last}."
        )

    def pays_from(name: str) -> str:
        """The smallest size from which on the device is always clearly faster than the CPU."""
        gains: dict[int, Comparison] = {size: times.compare(name, to="CPU") for size, times in measured.items()}
        sizes = [size for size in gains if all(gains[later].faster for later in gains if later >= size)]
        return f"from {min(sizes)} x {min(sizes)} on" if sizes else f"at no size up to {max(measured)}"

    return (
        f"The GPU pays {pays_from('GPU')} if the data are there already, and "
        f"{pays_from('GPU, with copies there and back')} if they come from the host and go back."
    )


def _small_against_large(times: Times) -> str:
    sentences = []
    for name in dict.fromkeys(way.partition(":")[0] for way in times):
        loss = times.compare(f"{name}: {_TIMES} small", to=f"{name}: one large")
        sentences.append(f"on the {name} {_TIMES} small products of the same work {_in_words(loss)}")
    return f"{'; '.join(sentences)[0].upper()}{'; '.join(sentences)[1:]}."


def _in_words(loss: Comparison) -> str:
    if loss.slower:
        return f"take {1 / loss.ratio:.2g} times as long as one large one"
    if loss.faster:
        return f"are {loss.ratio:.2g} times as fast as one large one"
    return f"are {loss.lowest:.2g} to {loss.highest:.2g} times as fast as one large one, which is no clear difference"
