"""The same bytes over the bus as one tensor and as thousands; and from pinned and from pageable memory.

Every copy has a fixed cost (a call, a launch, a wait) in addition to the cost of its bytes. Pageable memory has another
cost: the CPU first copies it into a page-locked buffer. Pinned memory saves that. Without a GPU there is no bus: then
the experiment shows only the CPU's part, copies within the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Finding, Plot, Series, Table, Times, seconds

_Ways = dict[str, Callable[[], list[Any]]]
_WITHIN_HOST = "a copy within the host"  # the extra cost of pageable memory: the copy into a page-locked buffer


@experiment(
    "many-small-tensors",
    question="Many small tensors or one large one over the bus; pinned or pageable?",
    one_core=True,
)
def run(bench: Bench) -> Finding:
    count = bench.size(gpu=1 << 26, cpu=1 << 24, quick=1 << 22)  # numbers of four bytes
    most = bench.size(gpu=4096, cpu=4096, quick=1024)
    pieces_of = [1, most // 64, most // 8, most]
    rates: dict[str, list[float]] = {}
    rows = []
    for pieces in pieces_of:
        tensors = [bench.random((count // pieces,), bench.mh.cpu(), seed) for seed in range(pieces)]
        ways = _ways(bench, tensors)
        for name, way in ways.items():
            bench.equal(way()[-1], tensors[-1], compared=name)
        times = bench.trials(ways, {"tensors": pieces, "bytes": 4 * count})
        for name in ways:
            rates.setdefault(name, []).append(4 * count / times.median(name) / 1e9)
            rows.append((name, f"{pieces:,}", seconds(times.median(name)), f"{rates[name][-1]:.3g} GB/s"))
    title = f"{4 * count / 1e6:.0f} MB in one tensor and in many"
    lines = [Series(name, list(map(float, pieces_of)), values) for name, values in rates.items()]
    plot = Plot("line", title, lines, x_label="tensors", y_label="GB/s", log_x=True, log_y=True)
    memory = _host_memory(bench, count)
    about = f"{4 * count / 1e6:.0f} MB of host memory"
    tables = [Table(("way", "tensors", "time", "speed"), rows, title)]
    tables += [memory.table(to=_WITHIN_HOST, title=about)] if len(memory) > 1 else []
    conclusion = f"{_about_pieces(rates, pieces_of)} {_about_memory(bench, memory, count)}"
    return Finding(conclusion, tables, [plot, *([memory.bars(about)] if len(memory) > 1 else [])])


def _ways(bench: Bench, tensors: list[Any]) -> _Ways:
    mh, gpu = bench.mh, bench.gpu()
    if gpu is None:
        return {
            "copied one by one": lambda: [mh.copy(x) for x in tensors],
            "copied in one call": lambda: mh.copy(tensors),
        }
    on_gpu = mh.copy(tensors, gpu)
    return {
        "to the GPU, one by one": lambda: [mh.to(x, gpu) for x in tensors],
        "to the GPU, in one call": lambda: mh.to(tensors, gpu, wait=False).result(),
        "to the host, one by one": lambda: [mh.to(x, mh.cpu()) for x in on_gpu],
        "to the host, in one call": lambda: mh.to(on_gpu, mh.cpu(), wait=False).result(),
    }


def _host_memory(bench: Bench, count: int) -> Times:
    mh, gpu = bench.mh, bench.gpu()
    pageable = bench.random((count,), mh.cpu())
    ways = {_WITHIN_HOST: lambda: mh.copy(pageable)}
    if gpu is not None:
        ways["pageable, to the GPU"] = lambda: mh.to(pageable, gpu)
        pinned = bench.operations.pin(pageable)
        if pinned is not None:
            bench.equal(mh.to(pinned, gpu), pageable, compared="pinned and pageable")
            ways["pinned, to the GPU"] = lambda: mh.to(pinned, gpu)
    return bench.trials(ways, {"bytes": 4 * count})


def _about_pieces(rates: dict[str, list[float]], pieces: list[int]) -> str:
    one_by_one, in_one_call = list(rates.values())[:2]
    loss = one_by_one[0] / one_by_one[-1]
    if loss < 1.2:
        return f"{pieces[-1]:,} tensors are copied as fast as one of the same bytes."
    gained = in_one_call[-1] / one_by_one[-1]
    saved = f"is {gained:.2f} times as fast" if gained > 1.05 else "does not help"
    return (
        f"As {pieces[-1]:,} tensors the same bytes take {loss:.3g} times as long as in one tensor; one call for all of "
        f"them {saved}."
    )


def _about_memory(bench: Bench, times: Times, count: int) -> str:
    if "pinned, to the GPU" in times:
        return f"From pinned memory the copy {times.compare('pinned, to the GPU', to='pageable, to the GPU')}."
    if bench.gpu() is not None:
        return f"{bench.framework} has no pinned memory that one could ask for, so there is nothing to compare."
    rate = 4 * count / times.median(_WITHIN_HOST) / 1e9
    return (
        "There is no GPU here, so these are copies within the host's memory, and pinned memory cannot be shown at "
        f"work: the copy that it would save goes at {rate:.3g} GB/s."
    )
