"""Asks one framework for its devices, in a separate process.

Frameworks reserve memory when they start (JAX most of a GPU's, TensorFlow all of it), conflict with each other in one
process, and may crash or hang on a broken driver. So ``manyhands devices`` asks each framework in a child process,
which ends when it has answered, or is ended when it takes too long. The child prints one JSON object per line: first
the number of figures to ``expect``, then a ``progress`` for each measured figure, finally the ``report``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from manyhands.amounts import counted
from manyhands.device import FRAMEWORKS
from manyhands.placement import measure, moves

_SECONDS = 300
_MODEST = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


def installed() -> list[str]:
    """The frameworks that are installed; does not import them."""
    return [name for name in FRAMEWORKS if moves.installed(name)]


def ask(
    framework: str, *, measured: bool, expect: Callable[[int], None], progress: Callable[[str], None]
) -> dict[str, Any]:
    """The report of one framework, or ``{"framework": ..., "error": why there is none}``."""
    report: dict[str, Any] = {}
    # The child's stderr goes to a file: a pipe that nobody reads fills up, and the child would hang.
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        child = subprocess.Popen(
            _command(framework, measured=measured),
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
            errors="replace",
            env={**_MODEST, **os.environ},
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        limit = threading.Timer(_SECONDS, end)
        limit.start()
        try:
            for line in _lines(child):
                if "expect" in line:
                    expect(line["expect"])
                if "progress" in line:
                    progress(line["progress"])
                report = line.get("report", report)
            child.wait()
        finally:
            limit.cancel()
            child.kill()
            child.wait()
        if report:
            return report
        if late.is_set():
            return {"framework": framework, "error": f"did not answer within {counted(_SECONDS, 'second')}"}
        noise.seek(0)
        last = [line for line in noise if line.strip()] or [f"exit status {child.returncode}"]
    return {"framework": framework, "error": re.sub(r"^manyhands\.errors\.\w+: ", "", last[-1].strip())}


def _command(framework: str, *, measured: bool) -> list[str]:
    # -P: do not import files of the current folder that are named like a module (random.py, torch.py).
    options = ["--measure"] if measured else []
    return [sys.executable, "-P", "-m", "manyhands.cli.probe", framework, *options]


def _lines(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in the child's output; frameworks also print other lines."""
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def report(framework: str, *, measured: bool) -> dict[str, Any]:
    """What this framework sees, in this process; prints its progress."""
    door = importlib.import_module(f"manyhands.{framework}")
    backend = importlib.import_module(f"manyhands.backends.{framework}.devices")
    rows = []
    records = door.devices()
    _say({"expect": len(records) * len(measure.steps()) if measured else 0})
    for record in records:
        row = {**asdict(record), "device": str(record.device), "kind": record.kind, "index": record.index}
        if measured:
            native = door.cpu() if record.kind == "cpu" else door.gpu(record.index)
            row["speed"] = {}
            for name, value in measure.speed(backend, native):
                row["speed"][name] = value
                _say({"progress": f"{framework} {record.device} {name}"})
        rows.append(row)
    version = importlib.import_module(framework).__version__
    return {"framework": framework, "version": version, "virtual": backend.virtual_count(), "devices": rows}


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    _say({"report": report(sys.argv[1], measured="--measure" in sys.argv[2:])})
