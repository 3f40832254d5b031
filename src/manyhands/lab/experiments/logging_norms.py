"""A thousand products of 100 x 100, and the norm of each in a log on the host.

Reading a number on the host makes the host wait for the device, so it issues the next product only when the last one is
done. If the log stays on the device, it takes one wait. In a captured graph, the host does not even issue each product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Finding

_SIZE, _IN_A_CAPTURE = 100, 50


@experiment("logging-norms", question="What does it cost to log a number at every step?", one_core=True)
def run(bench: Bench) -> Finding:
    import numpy

    mh, matmul, norm = bench.mh, bench.operations.matmul, bench.operations.norm
    (device,) = bench.devices(1)
    products = 200 if bench.quick else 1000
    # A rotation: products with it keep their norm, however many there are.
    random = numpy.random.default_rng(0).standard_normal((_SIZE, _SIZE))
    turn = bench.tensor(numpy.linalg.qr(random)[0].astype("float32"), device)
    start = bench.random((_SIZE, _SIZE), device)

    def logged_products(x: Any) -> tuple[Any, list[Any]]:
        """Some of the products, with their norms on the device."""
        log = []
        for _ in range(_IN_A_CAPTURE):
            x = matmul(turn, x)
            log.append(norm(x))
        return x, log

    def read_each() -> Any:
        x, log = start, []
        for _ in range(products):
            x = matmul(turn, x)
            log.append(bench.operations.numpy(norm(x)))  # the host waits for it
        return numpy.asarray(log).reshape(-1)

    def keep(part: Callable[[Any], tuple[Any, list[Any]]]) -> Any:
        x, log = start, list[Any]()
        for _ in range(products // _IN_A_CAPTURE):
            x, norms = part(x)
            log += norms
        return bench.operations.numpy(bench.operations.join(log))  # one wait, one copy

    captured = mh.parallel(logged_products)
    ways: dict[str, Callable[[], Any]] = {
        "read each norm": read_each,
        "keep the log on the device": lambda: keep(logged_products),
        "captured with mh.parallel": lambda: keep(captured),
    }
    expected = read_each()
    for name in list(ways)[1:]:
        bench.say(f"checking: {name}")
        bench.equal(ways[name](), expected, tolerance=1e-2, compared=f"{name} and read each norm")
    times = bench.trials(ways, {"size": _SIZE, "products": products})
    keeping, best = (times.compare(name, to="read each norm") for name in list(ways)[1:])
    conclusion = f"{_of_keeping(keeping)} Captured, it {best}."
    title = f"{products} products of {_SIZE} x {_SIZE}, each norm in a log"
    where = bench.mh.device_of(start)
    notes = [f"On {where}. The captured part, {captured.explain().splitlines()[0]}."]
    return Finding(conclusion, [times.table(to="read each norm", title=title)], [times.bars(title)], notes)


def _of_keeping(comparison: Any) -> str:
    if comparison.faster:
        return f"Reading each norm takes {comparison.ratio:.2f} times as long as a log that stays on the device."
    if comparison.slower:
        return f"Reading each norm costs nothing here: a log that stays on the device {comparison}."
    return "Reading each norm costs nothing that can be measured here: the host has nothing to run ahead of."
