"""The tour of ``examples/`` in the framework under test."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.once
def test_the_tour_runs(framework: str) -> None:
    if framework == "torch":
        pytest.skip("PyTorch's tour are the notebooks")
    result = run_program(EXAMPLES / "frameworks" / f"with_{framework}.py", timeout=300, MANYHANDS_VIRTUAL_DEVICES="")
    assert result.returncode == 0, result.stderr
    one, two = [line for line in result.stdout.splitlines() if line.startswith("val_acc")]
    assert one.partition(",")[0] == two.partition(",")[0]  # the same accuracy on one device and on two
    assert "hidden waits: 1" in result.stdout
