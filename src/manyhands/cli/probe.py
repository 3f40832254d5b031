"""What one framework sees, asked in a process of its own.

Frameworks take what they find when they start (JAX most of a GPU's memory, TensorFlow all of it), fight
over one process, and may crash or hang on a broken driver. So the table of ``manyhands devices`` asks each in
a child process that ends when it has answered: one JSON object per line on its standard output, a ``progress``
for every figure measured and at last the ``report``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from manyhands import measure

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
_SECONDS = 300
_MODEST = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


def installed() -> list[str]:
    """The frameworks that could be imported here; none of them is."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name)]


def ask(framework: str, *, measured: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """The report of one framework, or ``{"framework": ..., "error": why there is none}``."""
    command = [sys.executable, "-m", "manyhands.cli.probe", framework, *(["--measure"] if measured else [])]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**_MODEST, **os.environ}
    )
    report: dict[str, Any] = {}
    try:
        for line in _lines(child):
            if "progress" in line:
                progress(line["progress"])
            report = line.get("report", report)
        _, noise = child.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"framework": framework, "error": f"did not answer within {_SECONDS} seconds"}
    finally:
        child.kill()
    if not report:
        last = [line for line in (noise or "").splitlines() if line.strip()] or [f"exit status {child.returncode}"]
        return {"framework": framework, "error": last[-1].strip()}
    return report


def _lines(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects among what the child prints; frameworks print things of their own too."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def report(framework: str, *, measured: bool) -> dict[str, Any]:
    """What this framework sees, in this process; prints its progress."""
    door = importlib.import_module(f"manyhands.{framework}")
    backend = importlib.import_module(f"manyhands.backends.{framework}")
    rows = []
    for record in door.devices():
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
