"""What several test files use."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable


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
