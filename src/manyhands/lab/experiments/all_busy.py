"""The CPU, a device and the bus between them, all busy at once; and copies to the host that hide behind products.

They are three resources: a product on the host, a product on the device and a copy between them do not depend on each
other. At best, all three together take as long as the longest of them.
"""

from __future__ import annotations

import time
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import EFFICIENCY, Answer, Plot, Times
from manyhands.schedule.timeline import Span

_REPEATS = 20
_IN_TURN, _AT_ONCE = "one after the other", "at once"
_THEN, _HIDDEN = "products, then copies", "copies behind products"


@Experiment(
    "all-busy",
    "Can the CPU, a device and the bus be busy at once?",
    "Automatic parallelism: computation on CPU and GPU and communication between them, in parallel.",
    apart=True,
)
def run(bench: Bench) -> Answer:
    times, spans = _three(bench)
    gain = times.compare(_AT_ONCE, to=_IN_TURN, most=3)
    longest = max(list(times)[:3], key=times.median)
    if not bench.virtual:  # one core that stands for a device can borrow another
        times.compare(_AT_ONCE, to=longest, most=EFFICIENCY)
    bound = times.median(longest)
    copies = _copies(bench)
    hidden = copies.compare(_HIDDEN, to=_THEN, most=2)
    conclusion = (
        f"All three at once {gain}, compared with one after the other: {times.median(_AT_ONCE) / bound:.2f} times the "
        f"time of the longest of them ({longest}). With copies that hide behind products, the work {hidden}."
    )
    shared = "Here the device and the bus are the host's too: three kinds of work share its cores and its memory."
    return Answer.of(
        conclusion,
        *times.shown("CPU, device and bus", _IN_TURN, {f"the longest alone ({longest})": bound}, list(times)[:3]),
        Plot("timeline", "All three at once", spans=spans),
        *copies.shown("Products on the device, results to the host", _THEN, parts=list(copies)[:2]),
        notes=[shared] if bench.virtual else [],
    )


def _three(bench: Bench) -> tuple[Times, list[Span]]:
    """The times of the three, apart and together, and when each worked in one run of all."""
    mh, operations = bench.mh, bench.operations
    (device,), host = bench.devices(1), mh.cpu()
    on_host = bench.random((bench.size(gpu=1000, cpu=600, quick=400),) * 2, host, 1)
    on_device = bench.random((bench.size(gpu=4000, cpu=600, quick=400),) * 2, device, 2)
    large = bench.random((bench.size(gpu=64, cpu=4, quick=2), 2**20), host, 3)
    if not bench.virtual and (pinned := operations.pin(large)) is not None:
        large = pinned  # the device reads page-locked memory without the host's help

    def compute(x: Any) -> Any:
        for _ in range(_REPEATS):
            result = operations.matmul(x, x)
        bench.number(result)  # the host waits for it
        return result

    def copy() -> Any:
        if bench.virtual:  # between devices of one CPU, a move may share memory; a copy may not
            return [mh.copy(large, device) for _ in range(_REPEATS)][-1]
        for _ in range(_REPEATS):
            arrival = mh.to(large, device, wait=False)
            while not arrival.ready():
                time.sleep(1e-4)
        return arrival.result()

    parts = {"CPU": lambda: compute(on_host), "device": lambda: compute(on_device), "bus": copy}
    spans: list[Span] = []  # of the latest run of all three

    def time_of(name: str) -> tuple[Any, Span]:
        begin = time.perf_counter()
        return parts[name](), Span("copies" if name == "bus" else "products", name, begin, time.perf_counter())

    def at_once() -> list[Any]:
        with mh.parallel(threads=len(parts)):
            tasks = [mh.task(time_of)(name) for name in parts]
        results, spans[:] = zip(*(task.result() for task in tasks), strict=True)
        return list(results)

    def one_after_the_other() -> list[Any]:
        return [part() for part in parts.values()]

    bench.equal(at_once(), one_after_the_other())
    times = bench.trials({**parts, _IN_TURN: one_after_the_other, _AT_ONCE: at_once})
    return times, spans


def _copies(bench: Bench) -> Times:
    """Products whose results go to the host: first all products and then all copies, and both overlapped."""
    mh, matmul = bench.mh, bench.operations.matmul
    (device,), host = bench.devices(1), mh.cpu()
    count, size = bench.size(gpu=50, cpu=20, quick=10), bench.size(gpu=4000, cpu=2000, quick=1500)
    inner = bench.size(gpu=4000, cpu=100, quick=100)  # on a CPU a square product takes far longer than its copy
    left, right = bench.random((size, inner), device, 1), bench.random((inner, size), device, 2)

    def products() -> list[Any]:
        return [matmul(left, right) for _ in range(count)]

    def then_copies() -> list[Any]:
        results = products()
        mh.synchronize()
        return [mh.copy(result, host) for result in results]

    def all_at_once() -> list[Any]:
        if not bench.virtual:
            arrivals = [mh.to(matmul(left, right), host, wait=False) for _ in range(count)]
            return [arrival.result() for arrival in arrivals]
        with mh.parallel():  # between virtual devices, mh.to(wait=False) copies at once, or shares memory
            copies = [mh.task(mh.copy)(mh.task(matmul)(left, right), host) for _ in range(count)]
        return [copy.result() for copy in copies]

    bench.equal(all_at_once(), then_copies(), compared=f"{_HIDDEN} and {_THEN}")
    computed = products()
    methods = {
        "products alone": products,
        "copies alone": lambda: [mh.copy(result, host) for result in computed],
        _THEN: then_copies,
        _HIDDEN: all_at_once,
    }
    return bench.trials(methods, {"rows": size, "inner": inner, "products": count})
