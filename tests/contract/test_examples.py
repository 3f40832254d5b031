"""The tour of ``examples/`` in the framework under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.once
def test_the_tour_runs(framework: str) -> None:
    if framework == "torch":
        pytest.skip("PyTorch's tour are the notebooks")
    script = EXAMPLES / "frameworks" / f"with_{framework}.py"
    environment = {**os.environ, "MANYHANDS_VIRTUAL_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    one, two = [line for line in result.stdout.splitlines() if line.startswith("val_acc")]
    assert one.partition(",")[0] == two.partition(",")[0]  # the same accuracy on one device and on two
    assert "hidden waits: 1" in result.stdout
