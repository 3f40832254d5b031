"""The book's loop prints the loss of every minibatch: what that wait costs, measured by the auditor.

To print a loss, the host waits until the device has computed it, and meanwhile launches nothing. The program is
``book_loop.py`` in ``lab/<framework>/``: once it prints the losses, once it keeps them on the device until the end.
``manyhands audit`` runs both; without a GPU it predicts for one (``--as-if-gpu``).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from manyhands.lab.bench import Bench
from manyhands.lab.experiment import experiment
from manyhands.lab.finding import Comparison, Finding, Plot, Table, seconds
from manyhands.schedule.pictures.timeline import Span

_WAYS = {"printed every minibatch": "printed", "kept on the device": "kept"}


@experiment("hidden-wait", question="What does it cost to print the loss of every minibatch?")
def run(bench: Bench) -> Finding:
    program: Any = importlib.import_module(f"manyhands.lab.{bench.framework}.book_loop")
    minibatches = bench.size(gpu=200, cpu=100, quick=30)

    def train(way: str) -> list[float]:
        with contextlib.redirect_stdout(io.StringIO()):  # do not measure the terminal
            losses: list[float] = program.train(way, minibatches)
        return losses

    bench.equal(train("printed"), train("kept"), tolerance=1e-6)
    ways = {name: lambda way=way: train(way) for name, way in _WAYS.items()}
    times = bench.trials(ways, {"minibatches": minibatches})
    bench.say("manyhands audit book_loop.py")
    with ThreadPoolExecutor(1 if bench.gpu() else 2) as pool:  # predictions do not disturb each other
        audited = pool.map(lambda way: _audit(bench, program.__file__, way), _WAYS.values())
        reports = dict(zip(_WAYS, audited, strict=True))
    rows = [
        (name, seconds(times.median(name) / minibatches), str(_waits(report)), _percent(report["gain"]))
        for name, report in reports.items()
    ]
    table = Table(("loop", "per minibatch", "waits", "gain without waits"), rows, "The book's loop")
    printed = reports["printed every minibatch"]
    spans = [
        Span("waits" if span["finding"] else "works", span["lane"], span["begin"], span["end"])
        for span in printed["timeline"]
    ]
    lines = (
        [Plot("timeline", "Some steps of the loop that prints, as the auditor sees them", spans=spans)] if spans else []
    )
    gain = times.compare("kept on the device", to="printed every minibatch")
    notes = [f"{name}: {report['verdict']}." for name, report in reports.items()]
    notes += [f"Line {finding['line']}: {finding['source']} Cure: {finding['cure']}" for finding in printed["findings"]]
    return Finding(_conclusion(bench, gain, reports), [table], [times.bars("The book's loop"), *lines], notes)


def _audit(bench: Bench, file: str, way: str) -> dict[str, Any]:
    """The report of ``manyhands audit --json`` on a copy of the program, which is audited like a user's program."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "book_loop.py"
        program.write_text(Path(file).read_text())
        options = ["--json", str(Path(folder) / "report.json"), *([] if bench.gpu() else ["--as-if-gpu"])]
        command = [sys.executable, "-m", "manyhands", "audit", *options, str(program), way]
        subprocess.run(command, check=True, capture_output=True)
        report: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return report


def _waits(report: dict[str, Any]) -> int:
    return sum(finding["count"] for finding in report["findings"])


def _percent(part: float | None) -> str:
    return "not known" if part is None else f"{part:.1%}"


def _conclusion(bench: Bench, gain: Comparison, reports: dict[str, dict[str, Any]]) -> str:
    printed, deferred = reports.values()
    seen = (
        f"The auditor sees {_waits(printed)} waits in the loop that prints, and {_waits(deferred)} in the one that "
        "reads later."
    )
    if printed["gain"] is None:
        predicted = ""
    elif printed["predicted"]:
        predicted = f" On {printed['device']} it predicts a gain of {printed['gain']:.1%} of a step without them."
    else:
        predicted = f" It estimates a gain of {printed['gain']:.1%} of a step without them."
    measured = f" Measured here, the loop that keeps its losses {gain}."
    if bench.gpu() is None and bench.framework in ("torch", "tensorflow") and not gain.faster:
        measured += " A CPU's operations are done when their call returns, so there is nothing left to wait for."
    return seen + predicted + measured
