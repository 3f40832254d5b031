"""Experiments of the lab that do something else where there is a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from support import run_command

NAMES = ("unequal-devices", "steps-in-flight", "parameter-access", "logging-norms", "many-small-tensors")


def test_experiments_use_the_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    child = run_command("lab", "run", *NAMES, "--quick", "--framework", "torch", "--json", str(report))
    results = {result["experiment"]: result for result in json.loads(report.read_text())["results"]}
    assert {name: result["why"] for name, result in results.items()} == dict.fromkeys(NAMES, ""), child.stderr
    assert all(not result["virtual"] for result in results.values())
    assert {trial["name"] for trial in results["many-small-tensors"]["trials"]} >= {
        "pageable, to the GPU",
        "pinned, to the GPU",
        "To the GPU, one by one",
    }
    assert not any("made slow" in note for note in results["unequal-devices"]["finding"]["notes"])
