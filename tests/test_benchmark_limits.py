"""A benchmark in which something is slower than plain execution says so, and fails."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "parallel_limits.py"


def test_what_is_below_is_named_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    told = runpy.run_path(str(FILE))["told"]
    assert told({"chains, manyhands": 5.0, "resnet, reuse": 0.98}, 0.98, "eager") == 0
    assert capsys.readouterr().out == "never below 0.98 of eager (2 compared)\n"
    assert told({"chains, manyhands": 5.0, "resnet, reuse": 0.9751, "mlp, compile": 0.5}, 0.98, "eager") == 1
    assert (
        capsys.readouterr().out
        == "below 0.98 of eager: resnet, reuse, 0.975\nbelow 0.98 of eager: mlp, compile, 0.500\n"
    )


def test_rows_without_eager_or_without_a_way_are_left_out() -> None:
    against_eager = runpy.run_path(str(FILE))["against_eager"]
    rows = [
        {"name": "chains", "seconds": {"eager": 3.0, "ours": 2.0, "graph": 1.0}},
        {"name": "overhead", "seconds": {"ours": 2.0}},
    ]
    assert against_eager(rows, ["ours", "reuse"]) == {"chains, ours": 1.5}
