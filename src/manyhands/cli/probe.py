"""Asks one framework for its devices, in a separate process.

Frameworks reserve memory when they start (JAX most of a GPU's, TensorFlow all of it), conflict with each other in one
process, and may crash or hang on a broken driver. So ``manyhands devices`` asks each framework in a child process,
which prints its report as one line of JSON, and is ended when it takes too long.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from manyhands.amounts import count_of
from manyhands.device import FRAMEWORKS
from manyhands.placement import measure, moves

_SECONDS = 300
_MODEST = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


def installed_frameworks() -> list[str]:
    """The frameworks that are installed; does not import them."""
    return [name for name in FRAMEWORKS if moves.is_installed(name)]


def ask(framework: str, *, measured: bool = False) -> dict[str, Any]:
    """The report of one framework, or ``{"framework": ..., "error": why there is none}``."""
    # -P: do not import files of the current folder that are named like a module (random.py, torch.py).
    command = [sys.executable, "-P", "-m", __name__, framework, *(["--measure"] if measured else [])]
    environment = {**_MODEST, **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"framework": framework, "error": f"did not answer within {count_of(_SECONDS, 'second')}"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"framework"'):  # frameworks also print other lines
            report: dict[str, Any] = json.loads(line)
            return report
    *_, last = [f"exit status {done.returncode}", *(line for line in done.stderr.splitlines() if line.strip())]
    return {"framework": framework, "error": re.sub(r"^manyhands\.errors\.\w+: ", "", last.strip())}


def report(framework: str, *, measured: bool) -> dict[str, Any]:
    """What this framework sees, in this process."""
    module = importlib.import_module(f"manyhands.{framework}")
    backend = importlib.import_module(f"manyhands.backends.{framework}.devices")
    rows = []
    for record in module.devices():
        row = {**asdict(record), "device": str(record.device), "kind": record.kind, "index": record.index}
        if measured:
            native = module.cpu() if record.kind == "cpu" else module.gpu(record.index)
            row["speed"] = measure.speed(backend, native)
        rows.append(row)
    version = importlib.import_module(framework).__version__
    return {"framework": framework, "version": version, "virtual": backend.virtual_count(), "devices": rows}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], measured="--measure" in sys.argv[2:])), flush=True)
