"""Products on a device whose results go to the host: first all products, then all copies; and both overlapped.

A copy needs the bus and a product needs the device, so the copy of one result can overlap with the next product. At
best, both together take as long as the longer of the two: that is the bound.
"""

from __future__ import annotations

from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Bound, Finding, Times


@experiment("products-and-copies", question="Do copies to the host hide behind products?", apart=True)
def run(bench: Bench) -> Finding:
    mh, matmul = bench.mh, bench.operations.matmul
    (device,), host = bench.devices(1), mh.cpu()
    count = bench.size(gpu=50, cpu=20, quick=10)
    size = bench.size(gpu=4000, cpu=2000, quick=1500)
    inner = bench.size(gpu=4000, cpu=100, quick=100)  # on a CPU a square product takes far longer than its copy
    left, right = bench.random((size, inner), device, 1), bench.random((inner, size), device, 2)

    def products() -> list[Any]:
        return [matmul(left, right) for _ in range(count)]

    computed = products()

    def products_then_copies() -> list[Any]:
        results = products()
        mh.synchronize()
        return [mh.copy(result, host) for result in results]

    def started_at_once() -> list[Any]:
        arrivals = [mh.to(matmul(left, right), host, wait=False) for _ in range(count)]
        return [arrival.result() for arrival in arrivals]

    def tasks() -> list[Any]:
        with mh.parallel():
            copies = []
            for _ in range(count):
                product = mh.task(matmul)(left, right)
                copies.append(mh.task(mh.copy)(product, host))
        return [copy.result() for copy in copies]

    overlapped = {"mh.to(..., wait=False)": started_at_once, "tasks": tasks}
    notes = []
    if bench.virtual and bench.framework in ("torch", "tensorflow"):
        del overlapped["mh.to(..., wait=False)"]
        instead = "copies at once" if bench.framework == "torch" else "shares memory instead of copying"
        notes.append(f"mh.to(..., wait=False) is left out: on virtual devices it {instead} in this framework.")
    expected = products_then_copies()
    for name, way in overlapped.items():
        bench.equal(way(), expected, compared=f"{name} and products, then copies")
    ways = {
        "products alone": products,
        "copies alone": lambda: [mh.copy(result, host) for result in computed],
        "products, then copies": products_then_copies,
        **overlapped,
    }
    times = bench.trials(ways, {"rows": size, "inner": inner, "products": count})
    bound = Bound("the longer one alone", max(times.median("products alone"), times.median("copies alone")))
    best = min(overlapped, key=times.median)
    if bench.virtual and times.median(best) < 0.97 * bound.value:
        notes.append("Faster than the bound: some products ran at once, on both cores, and not on one device.")
    title = f"{count} products ({size} x {inner}) ({inner} x {size}), results to the host"
    table = times.table(to="products, then copies", title=title)
    return Finding(_conclusion(times, best), [table], [times.bars(title, [bound])], notes)


def _conclusion(times: Times, best: str) -> str:
    gain = times.compare(best, to="products, then copies")
    if gain.slower:
        return f"No: the best overlapped way ({best}) takes {1 / gain.ratio:.2f} times as long."
    if not gain.faster:
        return f"Not here: the best overlapped way ({best}) {gain}, compared with products first, then copies."
    alone = {work: times.median(f"{work} alone") for work in ("products", "copies")}
    near = times.median(best) / max(alone.values())
    hidden = _hidden(sum(alone.values()) - times.median(best), alone)
    return f"Yes: overlapped ({best}) is {gain.ratio:.2f} times as fast, {near:.2f} times the bound. {hidden}"


def _hidden(seconds: float, alone: dict[str, float]) -> str:
    """How much of the shorter work was hidden, compared with both alone."""
    shorter = min(alone, key=alone.__getitem__)
    part = seconds / alone[shorter]
    if part < 0.05:
        return f"Both alone take less together, so that none of the {shorter} is hidden: the gain is elsewhere."
    return f"{min(1.0, part):.0%} of the {shorter} are hidden."
