"""Rows of a benchmark, each in a process of its own.

Processes load their libraries, make their data and fill compilers' caches side by side. They train one by one, each
with the GPU for itself, within :func:`turn`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

P = TypeVar("P")

AHEAD = 4  # processes that are started: one of them trains
FILLING = 8  # that compile at the same time
_TURN = "BENCHMARK_TURN"


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """In a row's process: the GPU is its own within it."""
    path = os.environ.get(_TURN)
    if path is None:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure(
    command: Sequence[str], *, cache: str | Path | None = None, given: bytes | None = None, **variables: str
) -> dict[str, Any]:
    """The JSON that a process prints as its last line, or {"failed": why}; without ``cache`` compilers begin anew."""
    with tempfile.TemporaryDirectory() as empty:
        cache = str(cache or empty)
        compilers = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        environment = {**os.environ, **compilers, **variables}
        done = subprocess.run(
            [sys.executable, *command], input=given, capture_output=True, env=environment, check=False
        )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = done.stderr.decode().strip().splitlines() or ["nothing was printed"]
        return {"failed": f"its process ended with {done.returncode}: {said[-1]}"[:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def fill(pairs: Iterable[P], measure_one: Callable[[P], object]) -> None:
    """Run these only to fill compilers' caches."""
    with ThreadPoolExecutor(FILLING) as pool:
        list(pool.map(measure_one, pairs))


def by_turns(
    pairs: Sequence[P], measure_one: Callable[[P, Mapping[str, str]], dict[str, Any]]
) -> Iterator[tuple[P, dict[str, Any]]]:
    """Each pair with its result, in order; ``measure_one`` gets variables for the environment of the pair's process."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AHEAD) as pool:
        variables = {_TURN: f"{folder}/turn"}
        yield from zip(pairs, pool.map(lambda pair: measure_one(pair, variables), pairs), strict=True)
