"""A thousand products of 100 x 100, and the norm of each in a log; what ``manyhands audit`` sees in the same loop."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyhands.book.vocabulary import as_number
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment
from manyhands.lab.finding import Answer

_SIZE, _IN_A_CAPTURE = 100, 50
_READ, _KEPT, _CAPTURED = "read each norm", "keep the log on the device", "captured with mh.parallel"
_PROGRAM = """
import sys, {framework}
from manyhands import {framework} as mh
from manyhands.book.vocabulary import as_number
from manyhands.lab.operations import operations_of
import numpy

operations = operations_of("{framework}")
start = numpy.random.default_rng(0).standard_normal((100, 100)).astype("float32")
turn = x = mh.to(operations.tensor(numpy.linalg.qr(start)[0]), mh.try_gpu())
log = []
for product in range(50):
    x = operations.matmul(turn, x)
    norm = operations.norm(x)
    if sys.argv[1] == "read each norm":
        norm = as_number(norm)
    log.append(norm)
"""


@Experiment(
    "logging-norms",
    "What does it cost to log a number at every step?",
    "GPUs: 1000 products of 100 x 100, each norm read as it comes, or kept in a log on the GPU. "
    "Asynchronous computation: what does a wait in every step cost?",
    one_core=True,
)
def run(bench: Bench) -> Answer:
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

    def read_each() -> list[float]:
        x, log = start, []
        for _ in range(products):
            x = matmul(turn, x)
            log.append(as_number(norm(x)))  # the host waits for it
        return log

    def keep(part: Callable[[Any], tuple[Any, list[Any]]]) -> Any:
        x, log = start, list[Any]()
        for _ in range(products // _IN_A_CAPTURE):
            x, norms = part(x)
            log += norms
        return list(map(as_number, mh.to(log, mh.cpu(), wait=False).result()))

    captured = mh.parallel(logged_products, pure=True)
    methods: dict[str, Callable[[], Any]] = {
        _READ: read_each,
        _KEPT: lambda: keep(logged_products),
        _CAPTURED: lambda: keep(captured),
    }
    expected = read_each()
    for name in (_KEPT, _CAPTURED):
        bench.say(f"checking: {name}")
        bench.equal(methods[name](), expected, tolerance=1e-2, compared=f"{name} and {_READ}")
    times = bench.trials(methods, {"size": _SIZE, "products": products})
    title = f"{products} products of {_SIZE} x {_SIZE}, each norm in a log"
    kept, graph = (times.compare(name, to=_READ) for name in (_KEPT, _CAPTURED))
    conclusion = f"A log that stays on the device {kept}, compared with reading each norm; captured, it {graph}."
    notes = [f"On {mh.device_of(start)}. The captured part, {captured.explain().splitlines()[0]}."]
    notes += [f"manyhands audit, {name}: {_audit(bench, name)}." for name in (_READ, _KEPT)]
    return Answer.of(conclusion, *times.shown(title, _READ), notes=notes)


def _audit(bench: Bench, name: str) -> str:
    """What ``manyhands audit`` says about the loop as a program."""
    bench.say(f"manyhands audit: {name}")
    with tempfile.TemporaryDirectory() as folder:
        program, report = Path(folder) / "norms.py", Path(folder) / "report.json"
        program.write_text(_PROGRAM.format(framework=bench.framework))
        options = ["--json", str(report), *([] if bench.gpu() else ["--as-if-gpu"])]
        command = [sys.executable, "-m", "manyhands", "audit", *options, str(program), name]
        subprocess.run(command, check=True, capture_output=True)
        audit: dict[str, Any] = json.loads(report.read_text())
    waits = sum(finding["count"] for finding in audit["findings"])
    lines = "".join(f"; line {finding['line']}: {finding['source']}" for finding in audit["findings"])
    return f"{waits} waits in 50 products{lines}"
