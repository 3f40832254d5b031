"""What several test files use."""

from __future__ import annotations

import os
import subprocess
import sys


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
