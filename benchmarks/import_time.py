"""What manyhands adds to the import of its framework: medians over fresh interpreters.

    python benchmarks/import_time.py [torch|jax|tensorflow|mxnet] [--rounds 10]

Both imports are timed in the same interpreter, one after the other. `cpu` is the interpreter's own processor time,
which other programs on the machine disturb less. Wanted: at most 60 ms for `from manyhands import torch`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys

CODE = """
import importlib, time
def timed(module):
    wall, cpu = time.perf_counter(), time.process_time()
    importlib.import_module(module)
    print(time.perf_counter() - wall, time.process_time() - cpu)
timed({framework!r})
timed("manyhands.{framework}")
"""


def measured(framework: str) -> list[float]:
    """Seconds of the framework's import and of manyhands: wall, cpu, wall, cpu."""
    # As for a user: the bytecode is written by the first import.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", CODE.format(framework=framework)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [float(word) for word in done.stdout.split()]


def main(framework: str, rounds: int) -> None:
    measured(framework)  # the warm-up: it fills the file cache and writes bytecode
    rows = [measured(framework) for _ in range(rounds)]
    medians = [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"{framework}, Python {platform.python_version()}, {platform.machine()}, n = {rounds}, ms (cpu):")
    print(f"  import {framework}: {medians[0]:.0f} ({medians[1]:.0f})")
    print(f"  from manyhands import {framework}: {medians[2]:.0f} ({medians[3]:.0f}) more")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What manyhands adds to the import of its framework.")
    parser.add_argument("framework", nargs="?", default="torch", choices=["torch", "jax", "tensorflow", "mxnet"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    main(options.framework, options.rounds)
