"""What several test files use."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes true; on a busy machine that may take a while."""
    until = time.monotonic() + 180
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def free_port() -> int:
    """A port with a free one behind it, where some processes meet; not one that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def leave_graphs_as_they_are() -> None:
    """Let TensorFlow run graphs as they are traced: a test runs each a few times, and optimising it takes longer."""
    import tensorflow

    tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def examples(usual: int) -> int:
    """How many random programs a test tries: as many as usual, or as ``MANYHANDS_EXAMPLES`` says."""
    return int(os.environ.get("MANYHANDS_EXAMPLES", usual))


def at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """What so many threads give that begin together; each gets its number."""
    start = threading.Barrier(count)

    def begin(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def run_program(
    *command: str | Path,
    stdin: str = "",
    cwd: Path | None = None,
    timeout: float | None = None,
    **environment: str | None,
) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, with its output; a variable that is None is not set there."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    command = (sys.executable, *command)
    return subprocess.run(
        command, input=stdin, cwd=cwd, timeout=timeout, env=variables, capture_output=True, text=True, check=False
    )


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command ``manyhands`` in a process of its own, as a user runs it."""
    return run_program("-m", "manyhands", *arguments, **{"COLUMNS": "120", **environment})


def run_python(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: for what must happen before a framework starts, or ends the process."""
    return run_program("-c", code, timeout=300, **environment)


class Stopped(Exception):
    """What a test stops a training with."""


class StopAt:
    """A schedule that leaves the rate alone and raises in the step after so many."""

    def __init__(self, step: int | None) -> None:
        self.left = step

    def __call__(self, done: float) -> float:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Stopped
        return 1.0


def same_rate(done: float) -> float:
    return 1.0


def as_if_killed(run: Path, step: int) -> Path:
    """A copy of a run's folder as a kill soon after that step would have left it; rows may be ahead of it."""
    from manyhands.training.checkpoints import store

    copied = run.with_name(f"{run.name}-killed-{step}")
    shutil.copytree(run, copied)
    store.drop_after(copied / "checkpoints", step)
    return copied


def lab_results(framework: str, *names: str) -> list[dict[str, Any]]:
    """Experiments of the lab with small sizes, all done: their results as in a report.

    In a process of their own: virtual devices are made before a framework starts.
    """
    child = run_program(Path(__file__).parent / "lab" / "small.py", framework, *names, timeout=900)
    assert child.returncode == 0, child.stderr[-2000:]
    results = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert [result["experiment"] for result in results] == list(names)
    for result in results:
        assert result["status"] == "done", result["why"]
        finding = result["finding"]
        assert finding["conclusion"].endswith(".")
        assert all((finding["tables"], finding["plots"], result["trials"]))
    return results
