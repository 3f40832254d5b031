"""What several test files use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes true; on a busy machine that may take a while."""
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command ``manyhands`` in a process of its own, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "manyhands", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: for what must happen before a framework starts, or ends the process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )
